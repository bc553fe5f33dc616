"""The Trainer of transformers trains a GPT-2 twice: as it is, and with half of the memory for activations.

usage: trainer.py

Prints the last loss, tokens per second, by how many megabytes the process grew (with the compiler and its libraries),
and what was planned for activations. On Linux.
"""

import subprocess
import sys
import time
from pathlib import Path

ROWS, SYMBOLS, STEPS, WARM_UP = 16, 256, 10, 4


def megabytes(name: str) -> float:
    """`VmRSS`, the resident memory of this process, or `VmHWM`, the most that it was."""
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) / 1024


def train(budget: str | None) -> str:
    """A row of the table."""
    import torch
    import transformers

    class Steady(transformers.TrainerCallback):
        """Notes time and memory after the first steps, in which everything is compiled."""

        def on_step_end(self, args: object, state: transformers.TrainerState, *_: object, **__: object) -> None:
            if state.global_step == WARM_UP:
                Path("/proc/self/clear_refs").write_text("5")
                self.begun = time.perf_counter()

    torch.manual_seed(0)
    text = torch.tensor(list(b"To be, or not to be, that is the question. " * 1000))
    data = [{"input_ids": row, "labels": row} for row in text[: 64 * SYMBOLS].view(-1, SYMBOLS)]
    sizes = {"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 256, "n_positions": SYMBOLS}
    config = transformers.GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    model = transformers.GPT2LMHeadModel(config)
    before = megabytes("VmRSS")
    if budget:
        model.compile(backend="lighterage", options={"budget": budget})
    arguments = transformers.TrainingArguments(
        "target/trainer",
        per_device_train_batch_size=ROWS,
        max_steps=STEPS,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    steady = Steady()
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data, callbacks=[steady])
    trainer.train()
    rate = (STEPS - WARM_UP) * ROWS * SYMBOLS / (time.perf_counter() - steady.begun)
    loss = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry][-1]
    planned = ""
    if budget:
        import lighterage

        planned = f", {max(plan.peak for plan in lighterage.stats().plans) / 2**20:.0f} MB planned"
    return f"loss {loss:.4f}, {rate:5.0f} tokens/s, {megabytes('VmHWM') - before:5.0f} MB{planned}"


def main() -> None:
    """A process for each row, so that no memory counts twice."""
    if len(sys.argv) > 1:
        print("row:", train(sys.argv[1] if sys.argv[1] != "stock" else None))
        return
    for way in ("stock", "100%", "50%"):
        run = subprocess.run([sys.executable, __file__, way], check=True, capture_output=True, text=True)
        (row,) = (line.removeprefix("row: ") for line in run.stdout.splitlines() if line.startswith("row: "))
        print(f"{way:>5}: {row}", flush=True)


if __name__ == "__main__":
    main()
