"""Fine-tunes a causal language model of `transformers` in a plain loop.

    python examples/finetune_transformers.py                             # one process, one rank
    penstock run --ranks 2 examples/finetune_transformers.py             # two processes, the same training
    penstock run --ranks 2 examples/finetune_transformers.py --model Qwen/Qwen3-0.6B --rate 2e-5

Without --model, a small Llama with random weights and a tokenizer of its own need nothing from the hub. Sums such as
"Ann has 31 pears and gets 7 more: 38." have different lengths, so that batches are padded. The result is an ordinary
folder of transformers: `AutoModelForCausalLM.from_pretrained("runs/finetuned")`.
"""

import argparse
import random

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    get_cosine_schedule_with_warmup,
)

import penstock


def texts(number, seed):
    """Sums, in words and figures."""
    random.seed(seed)
    names, fruits = ("Ann", "Bartholomew", "Cleo", "Dmitri"), ("pears", "plums", "blackberries")
    found = []
    for _ in range(number):
        a, b = random.randrange(100), random.randrange(20)
        found.append(f"{random.choice(names)} has {a} {random.choice(fruits)} and gets {b} more: {a + b}.")
    return found


def small_model():
    """A Llama with random weights, and a tokenizer that is trained on our texts."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=160, special_tokens=["<pad>", "<end>"], show_progress=False)
    tokenizer.train_from_iterator(texts(200, seed=0), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>")
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=4,
        num_attention_heads=4,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return LlamaForCausalLM(config), tokenizer


def loader(tokenizer, number, seed, rows=32):
    """Batches of input_ids, attention_mask and labels, which are -100 where there is padding."""
    data = [tokenizer(text + tokenizer.eos_token) for text in texts(number, seed)]
    # Every new length of a batch is recorded once: padding to a multiple of 8 keeps them few.
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False, pad_to_multiple_of=8)
    generator = torch.Generator().manual_seed(seed)  # every rank reads the same batches
    return DataLoader(data, rows, shuffle=True, collate_fn=collate, generator=generator)


def with_count(batch):
    """The batch with the number of its targets. The model divides its loss by it, whatever the microbatch."""
    return {**batch, "num_items_in_batch": (batch["labels"][:, 1:] != -100).sum()}


def evaluate(pipe, batches):
    """The mean loss of a token. `evaluate` switches dropout off and leaves gradients alone."""
    total = tokens = 0
    for batch in map(with_count, batches):
        total += float(pipe.evaluate(**batch).loss) * int(batch["num_items_in_batch"])
        tokens += int(batch["num_items_in_batch"])
    return total / tokens


def save(pipe, tokenizer, folder):
    """An ordinary folder of transformers. Every rank calls it, since each holds the weights of its own stages.

    For a model that is too large for one process: `penstock.checkpoint.export_safetensors`.
    """
    weights = {}
    for part in pipe.all_gather_object({name: tensor.cpu() for name, tensor in pipe.state_dict().items()}):
        weights.update(part)
    if pipe.is_main_process:
        pipe.model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", help="a model of the hub, or its folder")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--texts", type=int, default=1024)
    parser.add_argument("--rate", type=float, default=3e-3, help="of learning; a trained model wants less, as 2e-5")
    parser.add_argument("--folder", default="runs/finetuned")
    options = parser.parse_args()

    torch.manual_seed(0)  # every process builds the same model
    if options.model:
        model = AutoModelForCausalLM.from_pretrained(options.model)
        tokenizer = AutoTokenizer.from_pretrained(options.model)
    else:
        model, tokenizer = small_model()
    training, held_out = loader(tokenizer, options.texts, seed=1), loader(tokenizer, 64, seed=2)
    steps = options.epochs * len(training)

    # The model computes its own loss from `labels`: no loss_fn. Each microbatch's is a share of the batch's: "sum".
    example = with_count(next(iter(training)))
    with penstock.pipeline(model, (), example, microbatches=4, reduction="sum") as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=options.rate)
        scheduler = get_cosine_schedule_with_warmup(optimizer, steps // 10, steps)
        for epoch in range(1, options.epochs + 1):
            for batch in training:
                result = pipe.step(**with_count(batch))
                pipe.clip_grad_norm_(1.0)  # one norm over all ranks
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            loss, rate = evaluate(pipe, held_out), scheduler.get_last_lr()[0]
            if pipe.is_main_process:
                print(f"epoch {epoch}  loss {float(result.loss):.6f}  held out {loss:.6f}  rate {rate:.2e}", flush=True)
        save(pipe, tokenizer, options.folder)
        if pipe.is_main_process:
            continue_a_text(options.folder)


def continue_a_text(folder):
    """The result in plain transformers, in one process."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer("Cleo has 31 plums and gets 7 more:", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=8)[0], skip_special_tokens=True))


if __name__ == "__main__":
    main()
