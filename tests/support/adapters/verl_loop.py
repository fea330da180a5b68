"""verl's own trainer, started by our example, on CPUs; plugins/verl_on_cpu.py says what stands in."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pandas

from tests.conftest import REPOSITORY
from tests.support import canned_judge
from tests.support.adapters import ASK, emit
from tests.support.scripted_judge_server import Reply, ScriptedJudgeServer
from tests.support.tiny_model import build_tiny_model, tiny_tokenizer
from tests.support.tool_templates import QWEN25

PLUGINS = REPOSITORY / "tests" / "support" / "adapters" / "plugins"
WORKERS = 2
"""Training workers."""
EXAMPLE = REPOSITORY / "examples" / "trainers" / "verl" / "run.sh"


def judged(prompt: str) -> str | Reply:
    """The canned judge; it fails to score rollouts that book the flight XX0."""
    failed = prompt.startswith("You grade one run") and "booked XX0" in prompt
    return Reply(status=400) if failed else canned_judge.answer(prompt)


def settings(out: Path, model: str, judge: str) -> list[str]:
    """verl's arguments: two steps of two prompts, five runs each."""
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    values = {
        "data.train_files": out / "prompts.parquet",
        "data.val_files": out / "prompts.parquet",
        "data.train_batch_size": 2,
        "data.max_prompt_length": 1024,
        "data.max_response_length": 512,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": 2,
        f"{actor}.ppo_micro_batch_size_per_gpu": 10 // WORKERS,
        f"{actor}.policy_loss.loss_mode": "seen",
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"+{actor}.fsdp_config.mixed_precision": "{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}",
        f"{actor}.shuffle": True,
        f"{actor}.optim.lr": 0.001,
        f"{rollout}.name": "scripted",
        f"{rollout}.n": 5,
        f"{rollout}.tensor_model_parallel_size": WORKERS,
        f"{rollout}.calculate_log_probs": False,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": 10 // WORKERS,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.agent.default_agent_loop": "tool_agent",
        f"{rollout}.multi_turn.enable": True,
        f"{rollout}.multi_turn.function_tool_path": PLUGINS / "verl_tools.py",
        "reward.num_workers": 1,
        "trainer.device": "cpu",
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": WORKERS,
        "trainer.logger": "[console]",
        "trainer.val_before_train": False,
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": out / "checkpoints",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "ray_kwargs.ray_init.num_cpus": 16,
        "+ray_kwargs.ray_init.num_gpus": WORKERS,
        "+ray_kwargs.ray_init.include_dashboard": False,
        "+ray_kwargs.ray_init._temp_dir": out / "ray",
        "draco.model": "openai/canned",
        "draco.budget": "null",
        "draco.store": out / "verdicts.sqlite",
        "+draco.api_base": judge,
    }
    return [f"{name}={value}" for name, value in values.items()]


def main() -> None:
    """Train, and print what verl's loss was given."""
    with tempfile.TemporaryDirectory() as folder, ScriptedJudgeServer(answer=judged) as judge:
        out = Path(folder)
        model = str(build_tiny_model(out / "model"))
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = QWEN25
        tokenizer.save_pretrained(model)
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{ASK} Passenger {name}."}],
                "data_source": "flights",
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": n},
            }
            for n, name in enumerate(("Ann", "Bob", "Cid", "Dee"))
        ]
        pandas.DataFrame(rows).to_parquet(out / "prompts.parquet")
        environment = {
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "PYTHONPATH": f"{REPOSITORY}:{PLUGINS}",
            "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
            "VERL_SEEN": folder,
            "OPENAI_API_KEY": "none",
            "HYDRA_FULL_ERROR": "1",
        }
        command = ["sh", str(EXAMPLE), *settings(out, model, judge.base), f"hydra.run.dir={out}/hydra"]
        done = subprocess.run(command, env=os.environ | environment, stdout=sys.stderr, cwd=folder)
        assert done.returncode == 0, done.returncode
        found = [json.loads(line) for path in sorted(out.glob("rows-*")) for line in path.read_text().splitlines()]
        emit(
            {
                "rows": [{**each, "text": tokenizer.decode(each["ids"])} for each in found],
                "weights": [path.read_text().split() for path in sorted(out.glob("weights-*"))],
            }
        )


if __name__ == "__main__":
    main()
