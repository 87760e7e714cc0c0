"""Fine-tune on packed chats with TRL's SFTTrainer, and resume inside an epoch.

The nodes of the cache have made tokens and loss masks of the messages. A view packs them; the loss
leaves out what users say. It starts a cache on this machine, trains a tiny model on two ranks,
stops, and continues with one:

    python examples/chat_sft.py

With a cache that has the dataset ``chats`` of `chats.py`:

    torchrun --nproc-per-node 2 examples/chat_sft.py --endpoint grpc://127.0.0.1:50051
"""

from __future__ import annotations

import argparse
import gc
import os
from typing import Any

import chats
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group: see "The end of a rank" in README.md
from accelerate.utils import is_deepspeed_available
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from cache_client import CacheIterableDataset, TrainsFromCache, View

if is_deepspeed_available():
    import deepspeed  # noqa: F401  # before the group too: accelerate imports it if it is installed

SEQUENCE_LENGTH = 128


def main() -> None:
    """Trains for two epochs; prints the loss, and how many chats were seen exactly once."""
    arguments = chats.arguments(
        "Fine-tune on chats with TRL", "sft-output", 4, "sequences a step, of all ranks"
    )
    train(arguments)
    if dist.is_initialized():  # by SFTConfig, with more than one rank
        gc.collect()
        dist.destroy_process_group()


class ChatTrainer(TrainsFromCache, SFTTrainer):
    """TRL's trainer, with batches and positions of the cache; notes what it trains on."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.seen: list[object] = []

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any) -> Any:
        """Splits the sequences into the chats that they were packed of."""
        for tokens, positions in zip(inputs["input_ids"], inputs["position_ids"], strict=True):
            starts = torch.nonzero(positions == 0)[1:, 0].tolist()
            documents = [each.tolist() for each in torch.tensor_split(tokens, starts)]
            self.seen += [each for each in documents if any(each)]  # not of padding alone
        return super().training_step(model, inputs, *rest)


class Stop(TrainerCallback):
    """Saves a checkpoint and ends, as a pre-empted job does."""

    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Compares the step."""
        if state.global_step == self.step:
            control.should_save = control.should_training_stop = True


def train(arguments: argparse.Namespace) -> None:
    """Trains, from the last checkpoint on, if there is one."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    options = SFTConfig(
        arguments.output_dir,
        num_train_epochs=arguments.epochs,
        per_device_train_batch_size=arguments.batch_size // world_size,
        learning_rate=1e-2,
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        bf16=False,
    )
    # After SFTConfig, which initialises torch.distributed.
    dataset = CacheIterableDataset(
        "chats",
        cache=arguments.endpoint,
        batch_size=arguments.batch_size // world_size,
        shuffle=True,
        view=View(
            pack="chat.tokens",
            label_mask="chat.loss_mask",
            sequence_length=SEQUENCE_LENGTH,
            cut_documents=False,
            long_documents="truncate",
            best_fit=True,
        ),
        transform=model_inputs,
    )
    tokenizer = make_tokenizer()
    trainer = ChatTrainer(
        tiny_model(len(tokenizer)),
        options,
        train_dataset=dataset,
        processing_class=tokenizer,
        callbacks=[Stop(arguments.stop_after_steps)],
    )
    os.makedirs(arguments.output_dir, exist_ok=True)
    trainer.train(resume_from_checkpoint=get_last_checkpoint(arguments.output_dir))
    steps = trainer.state.global_step
    chats.note(arguments.output_dir, steps, dataset.rank, trainer.seen)
    trainer.accelerator.wait_for_everyone()
    if trainer.is_world_process_zero():
        losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
        print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.3f} at step {steps}")
        if steps == trainer.state.max_steps:
            print(chats.count(arguments.output_dir, arguments.epochs))


def model_inputs(batch: dict[str, Any]) -> dict[str, Any]:
    """Names as the model has them. Position ids that begin anew keep chats apart in attention."""
    return {
        "input_ids": batch["chat.tokens"],
        "labels": batch["labels"],
        "position_ids": batch["position_ids"],
    }


def make_tokenizer() -> PreTrainedTokenizerFast:
    """The tokenizer of the nodes, as Transformers has it."""
    return PreTrainedTokenizerFast(
        tokenizer_object=chats.make_tokenizer(), eos_token=chats.END, pad_token=chats.PAD
    )


def tiny_model(vocabulary: int) -> LlamaForCausalLM:
    """A model of two layers, from a configuration: nothing is downloaded."""
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=SEQUENCE_LENGTH,
        )
    )


if __name__ == "__main__":
    main()
