# Lies in /etc/profile.d: a login shell's /etc/profile sets PATH anew, and Ray's cluster launcher runs everything in login shells.
PATH=/opt/draco/bin:$PATH
export PATH
