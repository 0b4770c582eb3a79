"""Other libraries' losses as steps of the same shape; see `README.md` for their environment.

These libraries score a batch against candidates that hold the batch's own positives. So the
candidates here are the B positives and M - B sampled labels: the product has the shape of
Evenhand's, (B, D) (D, M), and an example has M - 1 negatives. Each loss is called on vectors that
are already there, as its documentation does with the output of an encoder, and the table is
updated by Adagrad. None of them keeps the hardest examples of a batch.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from ways import LEARNING_RATE, SCALE, Problem, Step, Way, trained

LossOfVectors = Callable[[Tensor, Tensor, Tensor], Tensor]  # (B, D), (M, D), (M,) ids -> ()
METRIC_LEARNING = ("pytorch-metric-learning",)
SENTENCES = ("sentence-transformers",)
TENSORFLOW = ("tensorflow", "tensorflow-recommenders")


def in_torch(problem: Problem, loss_fn: LossOfVectors) -> Step:
    shape = problem.shape
    embedding = problem.embedding(is_sparse=False)
    optimizer = torch.optim.Adagrad(embedding.parameters(), lr=LEARNING_RATE, fused=True)
    queries = problem.features.clone().requires_grad_()

    def step() -> None:
        drawn = problem.draw(max(0, shape.sampled - shape.batch_size))
        ids = torch.cat([problem.label_ids, drawn])  # (M,), the positives first
        trained(optimizer, loss_fn(queries, embedding(ids), ids), queries)

    return step


def supervised_contrastive(problem: Problem) -> Step:
    """A softmax over all candidates, in whole matrices: their loss nearest to ours."""
    from pytorch_metric_learning.losses import SupConLoss

    loss_fn = SupConLoss(temperature=1 / SCALE)
    return in_torch(
        problem,
        lambda queries, vectors, ids: loss_fn(queries, problem.label_ids, None, vectors, ids),
    )


def batch_hard(problem: Problem) -> Step:
    """The hardest candidate of each example: k = 1."""
    from pytorch_metric_learning.losses import TripletMarginLoss
    from pytorch_metric_learning.miners import BatchHardMiner

    miner, loss_fn = BatchHardMiner(), TripletMarginLoss()
    return in_torch(problem, mined(problem, miner, loss_fn))


def multi_similarity(problem: Problem) -> Step:
    """Every candidate that scores above the worst positive less a margin."""
    from pytorch_metric_learning.losses import MultiSimilarityLoss
    from pytorch_metric_learning.miners import MultiSimilarityMiner

    miner, loss_fn = MultiSimilarityMiner(), MultiSimilarityLoss()
    return in_torch(problem, mined(problem, miner, loss_fn))


def mined(
    problem: Problem, miner: Callable[..., object], loss_fn: Callable[..., Tensor]
) -> LossOfVectors:
    def loss_of(queries: Tensor, vectors: Tensor, ids: Tensor) -> Tensor:
        pairs = miner(queries, problem.label_ids, vectors, ids)
        return loss_fn(queries, problem.label_ids, pairs, vectors, ids)

    return loss_of


def ranking(problem: Problem) -> Step:
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

    size = problem.shape.batch_size
    loss_fn = MultipleNegativesRankingLoss(torch.nn.Sequential(torch.nn.Identity()), scale=SCALE)
    return in_torch(
        problem,
        lambda queries, vectors, ids: loss_fn.compute_loss_from_embeddings(
            [queries, vectors[:size], vectors[size:]], ids
        ),
    )


def cached_ranking(problem: Problem) -> Step:
    """The same in parts of the batch, for memory; the part's size is the user's choice."""
    from sentence_transformers.sentence_transformer.losses import CachedMultipleNegativesRankingLoss

    size = problem.shape.batch_size
    loss_fn = CachedMultipleNegativesRankingLoss(
        torch.nn.Sequential(torch.nn.Identity()), scale=SCALE, mini_batch_size=256
    )

    def loss_of(queries: Tensor, vectors: Tensor, ids: Tensor) -> Tensor:
        """As the library does: gradients by the vectors part by part, then the rest at once."""
        held = [
            part.detach().requires_grad_() for part in (queries, vectors[:size], vectors[size:])
        ]
        loss_fn.calculate_loss([[part] for part in held], with_backward=True)
        gradients = [part.grad for part in held if part.grad is not None]
        return (queries * gradients[0]).sum() + (vectors * torch.cat(gradients[1:])).sum()

    return in_torch(problem, loss_of)


def recommenders(problem: Problem) -> Step:
    """TensorFlow Recommenders' retrieval task with its own hard negative mining."""
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")  # the library knows no other Keras
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf
    import tensorflow_recommenders as tfrs

    shape = problem.shape
    if not tf.config.threading.get_intra_op_parallelism_threads():
        tf.config.threading.set_intra_op_parallelism_threads(torch.get_num_threads())
    table = tf.Variable(problem.table.numpy())
    queries = tf.Variable(problem.features.numpy())
    label_ids = tf.constant(problem.label_ids.numpy())
    task = tfrs.tasks.Retrieval(
        num_hard_negatives=shape.hard_labels, temperature=1 / SCALE, remove_accidental_hits=True
    )
    optimizer = tf.keras.optimizers.Adagrad(LEARNING_RATE)
    num_drawn = max(0, shape.sampled - shape.batch_size)

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> object:
        drawn = tf.random.uniform((num_drawn,), maxval=shape.labels, dtype=tf.int64)
        ids = tf.concat([label_ids, drawn], axis=0)  # (M,)
        with tf.GradientTape() as tape:
            vectors = tf.nn.embedding_lookup(table, ids)  # (M, D)
            loss = task(queries, vectors, candidate_ids=ids, compute_metrics=False)
        query_gradients, table_gradients = tape.gradient(loss, [queries, table])
        optimizer.apply_gradients([(table_gradients, table)])
        return query_gradients

    return lambda: step().numpy()  # waits for the result


PEERS: dict[str, Way] = {
    name: Way(build, is_swept=False, packages=packages)
    for name, build, packages in (
        ("pytorch-metric-learning SupConLoss", supervised_contrastive, METRIC_LEARNING),
        ("pytorch-metric-learning BatchHardMiner", batch_hard, METRIC_LEARNING),
        ("pytorch-metric-learning MultiSimilarityMiner", multi_similarity, METRIC_LEARNING),
        ("sentence-transformers MultipleNegativesRankingLoss", ranking, SENTENCES),
        ("sentence-transformers, the same, cached", cached_ranking, SENTENCES),
        ("TensorFlow Recommenders, hard negatives", recommenders, TENSORFLOW),
    )
}
