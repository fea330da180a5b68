"""Print one secret of AWS Secrets Manager, for ``NAME="$(python cluster/aws_secret.py ID)"`` in a start command.

The instance's role must allow ``secretsmanager:GetSecretValue`` on it. The value passes through the shell's memory
only: it is in no process's arguments, in no file and in no log.
"""

import sys

import boto3


def main() -> None:
    """Print the secret that the one argument names."""
    secret = boto3.client("secretsmanager").get_secret_value(SecretId=sys.argv[1])
    print(secret["SecretString"])


if __name__ == "__main__":
    main()
