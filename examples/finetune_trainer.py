"""The fine-tuning of finetune_transformers.py inside `transformers.Trainer`: it runs the loop, logs, evaluates, saves.

    python examples/finetune_trainer.py                                  # one process, one rank
    penstock run --ranks 2 examples/finetune_trainer.py                  # two processes, the same training
    penstock run --ranks 2 examples/finetune_trainer.py --resume         # goes on from the last checkpoint

Batches, learning rates, clipping, accumulation, bf16, callbacks, trackers, `compute_metrics`, checkpoints and
`load_best_model_at_end` are the Trainer's. It has no replicas, no FSDP, DeepSpeed or fp16, and no loss of its own: for
these, write the plain loop. Activations are recomputed, and stages compiled, by the pipeline's options.
"""

import argparse

import torch
from finetune_transformers import small_model, texts
from transformers import DataCollatorForLanguageModeling, PrinterCallback, TrainerCallback, TrainingArguments

import penstock
from penstock.integrations.transformers import PipelineTrainer


class Print(TrainerCallback):
    """Prints what the Trainer logs, from the first process."""

    def on_log(self, args, state, control, logs, **kwargs):
        shown = [
            f"{name} {logs[name]:.4f}" for name in ("loss", "grad_norm", "eval_loss", "eval_accuracy") if name in logs
        ]
        if state.is_world_process_zero and shown:
            print(f"step {state.global_step:4d}  {'  '.join(shown)}", flush=True)


def most_likely(logits, labels):
    """What is kept of the logits for `accuracy`: a number a token rather than one a word of the vocabulary."""
    return logits.argmax(-1)


def accuracy(predicted):
    """The share of tokens that the model predicts."""
    tokens, labels = predicted.predictions[:, :-1], predicted.label_ids[:, 1:]
    return {"accuracy": float((tokens == labels)[labels != -100].mean())}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--folder", default="runs/trainer")
    parser.add_argument("--resume", action="store_true")
    options = parser.parse_args()

    torch.manual_seed(0)  # every process builds the same model
    model, tokenizer = small_model()
    data, held_out = ([tokenizer(text + "<end>") for text in texts(*which)] for which in ((options.texts, 1), (64, 2)))
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)
    args = TrainingArguments(
        options.folder,
        num_train_epochs=options.epochs,
        per_device_train_batch_size=32,  # of the pipeline, which cuts it into microbatches
        per_device_eval_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        eval_strategy="epoch",
        save_strategy="epoch",
        save_total_limit=2,
        logging_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )
    # The Trainer passes the number of targets in a batch. Losses of microbatches are shares of the batch's: "sum".
    with penstock.pipeline(
        model, (), collate(data[:32]), microbatches=4, reduction="sum", devices=args.device.type
    ) as pipe:
        trainer = PipelineTrainer(
            pipe,
            args,
            train_dataset=data,
            eval_dataset=held_out,
            data_collator=collate,
            compute_metrics=accuracy,
            preprocess_logits_for_metrics=most_likely,
            callbacks=[Print()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train(resume_from_checkpoint=options.resume)
        trainer.save_model()  # for AutoModelForCausalLM.from_pretrained


if __name__ == "__main__":
    main()
