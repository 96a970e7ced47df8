"""Train and predict with Hugging Face's Trainer, and gather the input of the metrics with objcomm.

Trainer gathers padded tensors onto every rank, and every rank computes the metrics. Here each rank
keeps its predictions as objects. Only rank 0 scores them, and all ranks get the score or the error.
The model is created from a config, so nothing is downloaded.

    torchrun --nproc-per-node 4 examples/with_hf_trainer.py
    python examples/with_hf_trainer.py
"""

import tempfile

import torch
import transformers
from sklearn.datasets import load_digits

import objcomm

TRAINED, TESTED, BATCH_SIZE = 1200, 597, 24  # images on all ranks together
INPUT = {"image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10}
LAYERS = {"hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64}

Batch = list[tuple[int, int]]  # each image's digit, and the model's answer


def score(parts: list[list[Batch]]) -> dict[str, float]:
    """Compute the metrics from the batches of all ranks."""
    # Ranks take batches in turn, and the last ones are filled up with the first images.
    in_order = [each for turn in zip(*parts, strict=True) for batch in turn for each in batch]
    return {"accuracy": sum(digit == answer for digit, answer in in_order[:TESTED]) / TESTED}


def main() -> None:
    """Train, evaluate, and print the score."""
    pixels, digits = load_digits(return_X_y=True)
    images = torch.tensor(pixels / 16).view(-1, 1, 8, 8)
    rows = [{"pixel_values": i, "labels": d} for i, d in zip(images, digits, strict=True)]
    torch.manual_seed(0)
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**INPUT, **LAYERS))
    mine: list[Batch] = []

    def keep(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:  # for one batch
        answers = logits.argmax(dim=1)
        mine.append(list(zip(labels.tolist(), answers.tolist(), strict=True)))
        return answers  # Trainer gathers this instead of the logits

    def compute_metrics(_: transformers.EvalPrediction) -> dict[str, float]:
        metrics = objcomm.reduce_and_broadcast(lambda: mine, score)
        mine.clear()  # for the next evaluation
        return metrics

    with tempfile.TemporaryDirectory() as folder:
        options = transformers.TrainingArguments(
            folder,
            use_cpu=True,
            per_device_train_batch_size=BATCH_SIZE // objcomm.world_size(),
            learning_rate=0.008,
            save_strategy="no",
            ddp_find_unused_parameters=False,
        )
        trainer = transformers.Trainer(
            model.double(),
            options,
            train_dataset=rows[:TRAINED],
            eval_dataset=rows[TRAINED:],
            compute_metrics=compute_metrics,
            preprocess_logits_for_metrics=keep,
        )
        trainer.remove_callback(transformers.ProgressCallback)
        trainer.train()
        metrics = trainer.evaluate()
    if objcomm.is_main():
        print(f"accuracy {metrics['eval_accuracy']:.6f} of {TESTED} images")


if __name__ == "__main__":
    objcomm.init("gloo")
    main()
    objcomm.shutdown()
