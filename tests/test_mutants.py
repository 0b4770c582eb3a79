"""Tests must be able to fail: every small mistake listed here must make one fail.

For each mutant the package with one phrase changed is tested by the real test files, in
a process of its own. Importing torch takes seconds, so one process imports it and forks for every
mutant: run as a script, this file is that process.
"""

import gc
import json
import os
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).parent
TESTED_BY = {
    "losses.py": "test_losses.py",
    "mining.py": "test_mining.py",
    "risk.py": "test_risk.py",
    "objective.py": "test_objective.py",
    "kernels/selection.py": "test_kernels.py",
    "models/retriever.py": "test_retriever.py",
    "training/step.py": "test_step.py",
    "kernels/sparse.py": "test_kernels.py",
    "kernels/cpu_selection.py": "test_kernels.py",
    "kernels/cpu_sparse.py": "test_kernels.py",
    "kernels/rows.py": "test_rows.py",
    "kernels/cpu_rows.py": "test_rows.py",
    "kernels/cpu_classifiers.py": "test_ranker.py",
    "search/ranker.py": "test_ranker.py",
    "search/ranked.py": "test_ranker.py",
    "theory/order.py": "test_theory_order.py",
    "theory/cvar.py": "test_theory_cvar.py",
    "theory/mean_bounds.py": "test_certificate.py",
    "theory/certificate.py": "test_certificate.py",
    "evaluation/scan.py": "test_slices.py",
    "tuning/choice.py": "test_tuning.py",
    "data/download.py": "test_download.py",
    "data/images.py": "test_images.py",
    "data/pickled.py": "test_images.py",
}
SECONDS_FOR_A_TEST = 20
NUM_WORKERS = max(2, os.cpu_count() or 1)


class Mutant(NamedTuple):
    file: str
    old: str  # a phrase that occurs once
    new: str
    caught_by: str = ""  # pytest's -k, to save time: which tests of the file must catch it


DENSE = "every and softmax"  # every label is kept: the tests of the dense coefficients

MUTANTS = [
    Mutant("losses.py", "F.relu(1 - margins)\n", "F.relu(2 - margins)\n"),
    Mutant("losses.py", "F.relu(1 - margins).square()", "F.relu(1 - margins)"),
    Mutant("losses.py", "threshold=36", "threshold=20"),
    Mutant("losses.py", "torch.exp(-margins)", "torch.exp(margins)"),
    Mutant("losses.py", "return margin_loss(positive", "return margin_loss(-positive"),
    Mutant("losses.py", "margin_loss(-scores)", "margin_loss(scores)"),
    Mutant("losses.py", "    _require_decreasing(margin_loss)\n", "", "refused"),
    Mutant("losses.py", "negative_scores.amax(", "negative_scores.amin("),
    Mutant("losses.py", "logsumexp(dim=-1) -", "logsumexp(dim=-1) +"),
    Mutant("losses.py", "logsumexp(dim=-1)", "exp().sum(dim=-1).log()", "extreme"),
    Mutant("losses.py", "[positive_scores.unsqueeze(-1), negative_scores]", "[negative_scores]"),
    Mutant("losses.py", "_power(1 - positive", "_power(1 + positive", "contrastive"),
    Mutant("losses.py", "_power(scores - margin", "_power(scores + margin", "contrastive"),
    Mutant("losses.py", "margin: float = 0.3", "margin: float = 0.0", "default"),
    Mutant("losses.py", "not -1 <= margin", "not -1 < margin", "outermost"),
    Mutant("losses.py", "not power >= 1", "not power > 1", "contrastive"),
    Mutant("losses.py", "else F.relu(distances) **", "else distances.abs() **", "contrastive"),
    Mutant("losses.py", "negative_scores > -torch.inf", "negative_scores >= -torch.inf"),
    Mutant("losses.py", "negative_scores.masked_fill(~is_label, 0)", "negative_scores  #", "own"),
    Mutant("losses.py", "cost_fn(scores).masked_fill(~is_label, 0)", "cost_fn(scores)"),
    Mutant("losses.py", "costs.sum(dim=-1) /", "costs.amax(dim=-1) /"),
    Mutant("losses.py", "is_label.sum(dim=-1).clamp(min=1)", "negative_scores.shape[-1]"),
    Mutant("losses.py", ".clamp(min=1)", "", "without_negatives"),
    Mutant("losses.py", "linspace(-8, 8", "linspace(-8, 1", "refused"),
    Mutant("losses.py", "values.diff() <= 0", "values.diff() < 0"),
    Mutant("mining.py", "largest(negative_scores,", "largest(-negative_scores,"),
    Mutant("mining.py", "negative_scores, num_hard_labels).pos", "negative_scores, 1).pos"),
    Mutant("mining.py", "hard_examples, sorted=False", "hard_examples, largest=False"),
    Mutant("mining.py", "negative_scores.shape[-1]", "negative_scores.shape[0]"),
    Mutant("mining.py", "not 1 <= value", "not 0 <= value", "refused"),
    Mutant("mining.py", "value <= limit", "value < limit"),
    Mutant("mining.py", "(sampled_ids < 0).exp", "(sampled_ids < -1).exp"),
    Mutant("mining.py", "sampled_ids < 0", "sampled_ids <= 0"),
    Mutant("mining.py", "is_masked | (", "is_masked & ("),
    Mutant("mining.py", "in positive_ids.unbind", "in positive_ids[:, :1].unbind"),
    Mutant("risk.py", "1 / len(losses))", "1)"),
    Mutant("risk.py", "les)  # (k',)\n    return", "les)\n    return num_hard_examples *", "top"),
    Mutant("risk.py", "d:]  # (k',)\n    weights =", "d:]\n    weights = 2 *", "range"),
    Mutant(
        "risk.py", "losses.isnan(), torch.nan, weights)", "False, torch.nan, weights)", "hidden"
    ),
    Mutant("risk.py", "= hardest_examples(losses,", "= hardest_examples(-losses,"),
    Mutant("risk.py", "(~(losses <= 0))", "(losses > 0)", "not_hidden"),
    Mutant("risk.py", "(~(losses <= 0)).float()", "(~(losses <= 0)).to(losses.dtype)", "half"),
    Mutant("risk.py", "losses <= 0", "losses < 0", "nonzero"),
    Mutant("risk.py", "counts.any(), weights, mean_weights(losses)", "counts.any(), weights, 0"),
    Mutant("risk.py", "hardest[num_dropped:]", "hardest[:num_hard_examples]", "range"),
    Mutant("risk.py", "num_dropped <= len", "num_dropped < len", "range"),
    Mutant("risk.py", "(1 + radius) / len(losses)", "radius / len(losses)", "ball"),
    Mutant("risk.py", "(is_valid * counts).argmax()", "is_valid.double().argmax()", "ball"),
    Mutant("risk.py", "(smallest >= 0) & ", "", "ball"),
    Mutant("risk.py", ".scatter_(0, order, weights)", ".copy_(weights)", "order"),
    Mutant("risk.py", " + math.log(len(losses))", "", "ball"),
    Mutant("risk.py", "divergences <= radius", "divergences <= 2 * radius", "ball"),
    Mutant("risk.py", "range(8)", "range(3)", "ball"),
    Mutant("risk.py", "values - values.amax()", "values - values.mean()", "ball"),
    Mutant("risk.py", "not radius >= 0", "radius < 0", "radius"),
    Mutant("risk.py", "[before, losses.detach()]", "[losses.detach(), before]", "window"),
    Mutant("risk.py", "[-self.window * len(losses) :]", "", "forgets"),
    Mutant("risk.py", "(losses, self.recent, tail", "(losses, losses, tail", "counts_more"),
    Mutant("risk.py", "all(), hardest, weights)", "all(), weights, weights)", "lags"),
    Mutant("risk.py", "num_hard_examples=1) / len(losses)\n", "num_hard_examples=1)\n", "lags"),
    Mutant("risk.py", "return {} if self.recent is None else", "return {} if True else", "saved"),
    Mutant("risk.py", 'self.recent = state.get("recent")', "pass", "saved"),
    Mutant("risk.py", "(1 - self.mixing) * num", "self.mixing * num", "multiplicative"),
    Mutant("risk.py", "dim=0)[example_ids]", "dim=0)[: len(losses)]", "multiplicative"),
    Mutant("risk.py", ", self.step_size * losses", ", -self.step_size * losses", "adversary"),
    Mutant("risk.py", "index_add_(0, example_ids,", "index_copy_(0, example_ids,", "twice"),
    Mutant("risk.py", '["log_weights"]\n\n\nclass', '["log_weights"] * 0\n\n\nclass', "saved"),
    Mutant("risk.py", '["log_weights"]\n\n\n#', '["log_weights"] * 0\n\n\n#', "saved"),
    Mutant("risk.py", "0 < mixing", "0 <= mixing", "mixing"),
    Mutant("risk.py", "/ counts.clamp(min=1)", "/ counts", "no_gap"),
    Mutant("risk.py", "weights + self.step_size", "weights - self.step_size", "worst_group"),
    Mutant("risk.py", "self.log_weights.logsumexp(0)", "self.log_weights.amax()", "no_gap"),
    Mutant("risk.py", "[group_ids] / counts[group_ids]", "[group_ids]", "group_means"),
    Mutant("risk.py", "floor = torch.finfo(weights.dtype).tiny", "floor = 0.0", "group"),
    Mutant("risk.py", "self._mixtures() @ values", "self._mixtures().T @ values", "mixtures"),
    Mutant("risk.py", "weights @ self._mixtures()", "self._mixtures() @ weights", "mixtures"),
    Mutant("risk.py", "tail_fraction * len(reference)", "tail_fraction * len(losses)", "window"),
    Mutant("risk.py", "math.ceil(tail_size - 1e-9)", "int(tail_size)", "tail"),
    Mutant("risk.py", "math.ceil(tail_size - 1e-9)", "math.ceil(tail_size)", "whole_tail"),
    Mutant("risk.py", "(tail_size - num_above) / num_equal", "(tail_size - num_above)", "share"),
    Mutant("risk.py", "(losses > threshold)", "(losses >= threshold)", "tail"),
    Mutant("risk.py", "part * (losses", "1 * (losses", "tail"),
    Mutant("risk.py", "losses.isnan(), torch.nan, parts", "losses.isnan(), 0, parts", "hidden"),
    Mutant("objective.py", "* losses).sum()", "* losses).mean()"),
    Mutant("objective.py", "hardest_labels(negative_scores,", "hardest_labels(-negative_scores,"),
    Mutant("objective.py", "negative_scores.gather(1, kept)", "negative_scores"),
    Mutant("objective.py", "negative_scores.gather", "negative_scores.detach().gather", "numeric"),
    Mutant("objective.py", "LossFn, softmax_loss", "LossFn, bowl_loss as softmax_loss", "default"),
    Mutant("objective.py", "scores, weights)  #", "scores, 0 * weights + 1)  #", "weighted"),
    Mutant("objective.py", "own.index_select(0, survivors)", "own[: len(survivors)]", "weighted"),
    Mutant("objective.py", "scores, weights[survivors])", "scores, 0 * losses + 1)", "weighted"),
    Mutant("objective.py", "own[survivors].req", "own[: len(survivors)].req", "weighted"),
    Mutant("objective.py", "[positive_scores.detach(),", "[positive_scores,", "not_changed"),
    Mutant("objective.py", "risk_fn(losses.detach())", "risk_fn(losses)", "leave_none"),
    Mutant("kernels/selection.py", "scores.topk(count", "(-scores).topk(count", "full_sort"),
    Mutant("kernels/selection.py", "min(batch_size, first + ", "(first + ", "blocks"),
    Mutant("kernels/selection.py", "(sampled_ids < 0)", "(sampled_ids < -1)", "mask_of"),
    Mutant("kernels/selection.py", "counts.cumsum(0) - counts)", "counts.cumsum(0))", "mask_of"),
    Mutant("kernels/cpu_selection.py", "[place] > threshold", "[place] >= threshold", "full_sort"),
    Mutant("kernels/cpu_selection.py", "num_folded, width):", "width, width):", "overlooked"),
    Mutant("kernels/cpu_selection.py", "> _INFINITY else key", "< 0 else key", "no_number"),
    Mutant("kernels/cpu_sparse.py", "ids[table[place]] != key", "ids[0] < 0", "distinct"),
    Mutant("kernels/cpu_sparse.py", "following[slot] = table[place]", "pass", "mask_of"),
    Mutant("kernels/cpu_sparse.py", "value == 0 or ids[row, column] < 0", "value == 0", "leaves"),
    Mutant("kernels/cpu_sparse.py", "= row, values[entry]", "= row, values[place]", "dense_matrix"),
    Mutant("kernels/rows.py", "(gradients - along", "(gradients + along", "autograd"),
    Mutant("kernels/rows.py", "(moments / correction)", "(moments / 1)", "compiled_updates"),
    Mutant("kernels/rows.py", "norms <= SMALLEST_NORM", "norms < 0", "zero_row"),
    Mutant("kernels/rows.py", "max ** 0.4", "max", "squares_overflow"),
    Mutant("kernels/cpu_rows.py", "product / norm / norm", "product / norm", "autograd"),
    Mutant("kernels/cpu_rows.py", "norm <= smallest", "norm < 0", "zero_row"),
    Mutant("kernels/cpu_rows.py", "square == math.inf", "False", "squares_overflow"),
    Mutant("kernels/cpu_rows.py", "(1 - second_beta) * square", "square", "compiled_updates"),
    Mutant("kernels/cpu_rows.py", "sums[ids[place]] = total", "pass", "compiled_updates"),
    Mutant(
        "kernels/cpu_classifiers.py", "sign * score - 1 + alpha", "sign * score + alpha", "minimise"
    ),
    Mutant(
        "kernels/cpu_classifiers.py", "np.float32(0.5) / cost", "np.float32(1.0) / cost", "minimise"
    ),
    Mutant("kernels/cpu_classifiers.py", "bias += change", "bias += 2 * change", "bias_alone"),
    Mutant(
        "kernels/cpu_classifiers.py",
        "num_active, last_maximum = count, np.inf  # those",
        "break  # those",
        "rest",
    ),
    Mutant(
        "kernels/cpu_classifiers.py",
        "if number >= num_positives",
        "if number > num_positives",
        "minimise",
    ),
    Mutant(
        "kernels/cpu_classifiers.py",
        "if new_alpha > 0 else np.float32(-1)",
        "",
        "tasks",
    ),
    Mutant(
        "kernels/cpu_classifiers.py",
        "weights[ids[entry]] = 0  # clean",
        "pass  # clean",
        "minimise",
    ),
    Mutant(
        "kernels/cpu_classifiers.py",
        "abs(value) < smallest_weight",
        "value < smallest_weight",
        "small_weights",
    ),
    Mutant(
        "kernels/cpu_classifiers.py",
        "+= dense[ids[entry]] * values[entry]\n        for",
        "+= values[entry] ** 2\n        for",
        "lengths",
    ),
    Mutant(
        "kernels/cpu_classifiers.py",
        "_mixed(np.uint64(labels[place]))",
        "_mixed(np.uint64(place))",
        "tasks",
    ),
    Mutant("kernels/cpu_classifiers.py", "if label != current:", "if current < 0:", "products"),
    Mutant("kernels/cpu_classifiers.py", "mined[place, column] = -1", "pass", "mined"),
    Mutant("search/ranker.py", "counts[positive_counts == 0] = 0", "pass", "without_positives"),
    Mutant(
        "search/ranker.py", "np.full(num_labels, WRONG,", "np.full(num_labels, 0,", "without_pos"
    ),
    Mutant(
        "search/ranked.py", "max(num_results, self.num_candidates)", "num_results", "candidates"
    ),
    Mutant("search/ranked.py", "return self.weight * torch", "return torch", "candidates"),
    Mutant("search/ranked.py", "descending=True", "descending=False", "candidates"),
    Mutant("models/retriever.py", "return self.scaled(self.unit(", "return (self.unit("),
    Mutant("models/retriever.py", "if self.scale == 1 else", "if self.scale >= 1 else"),
    Mutant(
        "training/step.py",
        "mask_shared_(scores, sample.ids, batch.positive_ids[first:last])",
        "scores",
        "product",
    ),
    Mutant(
        "training/step.py",
        "mask_positives(scores, sampled_ids, batch.positive_ids[first:last])",
        "scores",
        "product",
    ),
    Mutant("training/step.py", "scores += biases", "scores -= biases", "bias and product"),
    Mutant("training/step.py", "model.scaled(vector_gradients)", "vector_gradients", "product"),
    Mutant("training/step.py", "if is_log_q_corrected:", "if False:", "log and product"),
    Mutant(
        "training/step.py",
        "query_vectors.index_select(0, mined.query_rows)",
        "query_vectors[: len(mined.query_rows)]",
        "dot and product",
    ),
    Mutant(
        "training/step.py",
        "raw_vectors.index_select(0, mined.query_rows)",
        "raw_vectors[: len(mined.query_rows)]",
        "compiled and cosine and product",
    ),
    Mutant("training/step.py", "if kept is None and", "if", DENSE),
    Mutant("training/step.py", "and sample.ids.shape == (len(model.label_table),)", "", DENSE),
    Mutant(
        "training/step.py",
        "batch.label_ids.index_select(0, found.survivors)",
        "batch.label_ids[: len(found.survivors)]",
        DENSE,
    ),
    Mutant("training/step.py", "1, sampled_ids.cl", "1, sampled_ids.flip(0).cl", DENSE),
    Mutant("training/step.py", "matrix.index_add_(1, s", "matrix.index_copy_(1, s", DENSE),
    Mutant("training/step.py", ", rows.positive)", ", -rows.positive)", DENSE),
    Mutant(
        "training/step.py",
        "rows.index_select(0, b",
        "rows.flip(0).index_select(0, b",
        "dot and softmax and product",
    ),
    Mutant("training/step.py", "- first[places]", "", "dot and softmax and product"),
    Mutant("training/step.py", "counts.cumsum(0) - counts", "counts.cumsum(0) * 0", "product"),
    Mutant(
        "training/step.py",
        "negative.index_add_(0, places, found.negative)",
        "negative.index_copy_(0, places, found.negative)",
        "dot and softmax and product",
    ),
    Mutant("training/step.py", "(matrix != 0)", "(matrix > 0)", DENSE),
    Mutant(
        "training/step.py", "matrix.index_select(1, touched)", "matrix[:, : len(touched)]", DENSE
    ),
    Mutant("kernels/sparse.py", "matrix @ vectors", "matrix @ vectors.flip(0)", "dense_matrix"),
    Mutant("kernels/sparse.py", "matrix.T @ vectors", "matrix.T @ vectors.flip(0)", "dense_matrix"),
    Mutant("kernels/sparse.py", "sort(stable=True)", "sort(descending=True)", "dense_matrix"),
    Mutant("kernels/sparse.py", "& (ids >= 0)", "", "leaves"),
    Mutant("kernels/sparse.py", "check_ids(rows, len(starts) - 1)", "pass", "entries_of"),
    Mutant("kernels/sparse.py", "firsts - new_starts[:-1], lengths", "firsts, lengths", "entries"),
    Mutant("kernels/cpu_sparse.py", "= entry + shift", "= entry", "entries_of"),
    Mutant("theory/order.py", "[..., ::-1] @ weights", "@ weights", "order_weighted"),
    Mutant("theory/order.py", "1, num_drawn - 1", "1, num_drawn", "batch_enumerated"),
    Mutant("theory/order.py", "drawn, num_kept - 1)", "drawn, num_kept)", "batch_enumerated"),
    Mutant("theory/order.py", "_cumulative(num_kept - 1,", "_cumulative(num_kept,", "chosen_ranks"),
    Mutant("theory/order.py", "population_size) - 1).as", "population_size)).as", "chosen_ranks"),
    Mutant("theory/order.py", "(num_drawn / (population_size *", "(1 / (1 *", "batch_enumerated"),
    Mutant("theory/order.py", "(num_sampled_labels - 1,", "(num_sampled_labels,", "labels_drawn"),
    Mutant("theory/order.py", "min(num_hard_labels, num_seen)", "num_seen", "labels_drawn"),
    Mutant("theory/order.py", "drawn - limit - 1, pop", "drawn - limit, pop", "chosen_ranks"),
    Mutant("theory/order.py", "population < marked", "population > marked", "half_drawn"),
    Mutant("theory/order.py", "2.0**-60 * total", "2.0**-20 * total", "half_drawn"),
    Mutant("theory/order.py", "< 0.1, near, far", "< 0, near, far", "hundred_ranks"),
    Mutant("theory/order.py", "ranks.min() >= 1 and", "ranks.min() >= 0 and", "refused"),
    Mutant("theory/cvar.py", "[::-1][1:]  #", "[::-1][:-1]  #", "worst_share"),
    Mutant("theory/cvar.py", "thresholds >= 0, thresholds", "thresholds <= 0, thresholds", "zero"),
    Mutant("theory/cvar.py", "losses.clip(min=0)", "losses", "zero"),
    Mutant("theory/cvar.py", "min(risks.min(), at_zero)", "risks.min()", "zero"),
    Mutant("theory/cvar.py", "prepend=0.0) / tail_fraction", "prepend=0.0)", "worst_share"),
    Mutant("theory/cvar.py", "weights[order] = _weights", "weights[:] = _weights", "order_of_the"),
    Mutant("theory/cvar.py", "shares, sums) / fractions", "shares, sums)", "curve"),
    Mutant("theory/cvar.py", '"stable")[:num_hard', '"stable")[-num_hard', "mixture"),
    Mutant("theory/cvar.py", "counts / num_hard_examples", "counts / counts.max()", "mixture"),
    Mutant("theory/cvar.py", ", minlength=int(group_ids.max()) + 1", "", "without_examples"),
    Mutant("theory/cvar.py", "not 0 < tail_fraction", "not 0 <= tail_fraction", "refused"),
    Mutant("theory/mean_bounds.py", "len(bets) / delta)", "1 / delta)", "given_up"),
    Mutant("theory/mean_bounds.py", "1 - bets * weights", "1 - bets", "given_up"),
    Mutant("theory/mean_bounds.py", "bets * (weights - values)", "bets * (1 - values)", "given_up"),
    Mutant("theory/mean_bounds.py", "0.5**halvings", "0.5 ** (2 * halvings)", "given_up"),
    Mutant("theory/mean_bounds.py", "@ counts  # (J", "@ np.ones(len(values))  # (J", "repeats"),
    Mutant("theory/mean_bounds.py", "bets(int(counts.sum())", "bets(len(counts)", "repeats"),
    Mutant("theory/mean_bounds.py", "(root + 2 * MARGIN)", "low", "given_up"),
    Mutant("theory/mean_bounds.py", "values <= weights", "values <= 1", "refuses"),
    Mutant("theory/certificate.py", "(1 - ANCHOR_SHARE) * delta", "delta", "one_delta"),
    Mutant("theory/certificate.py", "* delta / len(ANCHORS)", "* delta", "one_delta"),
    Mutant("theory/certificate.py", "delta / len(CLUSTER_ANCHORS)", "delta", "cap_of_one"),
    Mutant("theory/certificate.py", "[ranks - 1]", "[ranks % len(losses)]", "one_delta"),
    Mutant("theory/certificate.py", "np.ceil(losses / RES", "np.floor(losses / RES", "rounded_up"),
    Mutant("theory/certificate.py", "np.ceil(sums / RES", "np.floor(sums / RES", "rounded_up"),
    Mutant("theory/certificate.py", " / (1 - anchor)\n    return", "\n    return", "one_delta"),
    Mutant("theory/certificate.py", "anchors >= thresholds", "anchors > thresholds", "one_delta"),
    Mutant("theory/certificate.py", "[[1.0], masses[::-1]]", "[masses[::-1], [1.0]]", "band_alone"),
    Mutant("theory/certificate.py", "lines.min(axis=-1)", "lines[..., 0]", "band_alone"),
    Mutant("theory/certificate.py", "max(rank - lowest", "max(rank - 1 - lowest", "all_counts"),
    Mutant("theory/certificate.py", ") - math.log(delta)", ") - math.log(2 * delta)", "fails_with"),
    Mutant("theory/certificate.py", "(1.0, cap / np.bin", "(1.0, 2 * cap / np.bin", "cap_of_one"),
    Mutant(
        "theory/certificate.py", "= np.argsort(-losses)", "= np.argsort(losses)", "minimum_over"
    ),
    Mutant("evaluation/scan.py", "counts <= MAX_SHARE", "counts < MAX_SHARE", "looked_at"),
    Mutant("evaluation/scan.py", "_pairs) & (counts <=", "_pairs + 1) & (counts <=", "looked_at"),
    Mutant("evaluation/scan.py", "small[_firsts(sums[small])]", "small", "looked_at"),
    Mutant("evaluation/scan.py", "(codes >= 0) & fulfils", "fulfils", "members"),
    Mutant("evaluation/scan.py", "earlier * (lengths.max(initial=0) + 1) + ", "", "lost_as_many"),
    Mutant("evaluation/scan.py", "[generator.permuted(places, axis=1)]", "[places]", "arrangement"),
    Mutant("evaluation/scan.py", "generator.permuted(drawn, axis=2)", "drawn", "arrangement"),
    Mutant(
        "evaluation/scan.py", "drawn, axis=2", "drawn.reshape(count, -1), axis=1", "arrangement"
    ),
    Mutant("evaluation/scan.py", "np.maximum(expected, counts * mean_loss)", "expected", "formula"),
    Mutant("evaluation/scan.py", "(num_conditions - 1)", "num_conditions", "formula"),
    Mutant("evaluation/scan.py", "max(1, len(pairs) - 1)", "len(pairs)", "formula"),
    Mutant("evaluation/scan.py", "sums - squares / lengths", "sums", "formula"),
    Mutant("evaluation/scan.py", "largest >= to_reach -", "largest > to_reach +", "p_value"),
    Mutant("evaluation/scan.py", "(1 + num_reached) /", "num_reached /", "one_after_the_other"),
    Mutant("tuning/choice.py", "max((trial.average", "min((trial.average", "rule"),
    Mutant("tuning/choice.py", "<= max_drop + ROUNDING", "<= max_drop", "just_the_drop"),
    Mutant("tuning/choice.py", "<= max_drop + ROUNDING", "< max_drop", "rule"),
    Mutant("tuning/choice.py", "t.average, -t.number)", "-t.number)", "rule"),
    Mutant("tuning/choice.py", "t.average, -t.number", "t.average, t.number", "rule"),
    Mutant("tuning/choice.py", "t: (-t.criterion", "t: (t.criterion", "sorted"),
    Mutant("tuning/choice.py", "self.average) and not", "self.average) or not", "rule"),
    Mutant("tuning/choice.py", "t.criterion >= chosen.low", "t.criterion > chosen.low", "rivals"),
    Mutant("tuning/choice.py", "trial.criterion > front", "trial.criterion >= front", "front"),
    Mutant("data/download.py", 'headers["If-Range"] = validator', "pass", "continued"),
    Mutant("data/download.py", "bytes={have}-", "bytes={have + 1}-", "continued"),
    Mutant("data/download.py", "not in (None, _validator(", "in (None, _validator(", "continued"),
    Mutant(
        "data/download.py",
        "            self.discard()\n            self.part.touch()\n",
        "",
        "know_ranges",
    ),
    Mutant("data/download.py", "have, length = 0,", "have, length = have,", "know_ranges"),
    Mutant("data/download.py", "start != have", "start < have", "content_range"),
    Mutant("data/download.py", "not start <= end < total", "not start <= end", "content_range"),
    Mutant("data/download.py", "have < total:", "have < 0:", "continued or later"),
    Mutant("data/download.py", "have > limit", "have < 0", "limit"),
    Mutant("data/download.py", "total != published:", "total < published:", "than_published"),
    Mutant(
        "data/download.py", "(size, None) if self.file.checksum else", "(size, None) or", "name"
    ),
    Mutant("data/download.py", "self.file.checksum or recorded", "recorded", "wrong_checksum"),
    Mutant("data/download.py", "checksum or recorded_checksum(self.path)", "checksum", "recorded"),
    Mutant("data/download.py", "scheme not in SCHEMES or (", "(", "another_scheme"),
    Mutant("data/download.py", 'scheme == "http"', "False", "from_https"),
    Mutant("data/download.py", "if path.exists():", "if False:", "good_file or neither"),
    Mutant("data/download.py", "etag.startswith('\"')", "etag", "last_change"),
    Mutant("data/download.py", "total - have > free", "False", "little_room"),
    Mutant(
        "data/download.py", 'get_content_type() == "text/html"', "get_content_type() == 1", "page"
    ),
    Mutant("data/download.py", "and not is_chunked", "and is_chunked", "length"),
    Mutant("data/images.py", "len(data) != expected", "len(data) > expected", "cut_short"),
    Mutant("data/images.py", "found != magic", "found < magic", "wrong_magic"),
    Mutant(
        "data/images.py", "len(images) != len(labels):", "len(images) > len(labels):", "more_labels"
    ),
    Mutant("data/images.py", "labels >= NUM_CLASSES", "labels > NUM_CLASSES", "out_of_range"),
    Mutant("data/images.py", "or len(data) % record", "", "inside_a_record"),
    Mutant("data/images.py", "len(set(sizes.values())) > 1", "False", "between_records"),
    Mutant("data/images.py", "or not member.isfile()", "", "links"),
    Mutant("data/images.py", "records[:, 1:]", "records[:, :-1]", "same_from_all"),
    Mutant("data/images.py", "0 <= label < NUM", "label < NUM", "fit_together"),
    Mutant(
        "data/pickled.py", "found not in {NDARRAY, DTYPE, *RECONSTRUCT}", "False", "instruction"
    ),
    Mutant("data/pickled.py", '"F" if is_by_column else "C"', '"C"', "newer_python"),
    Mutant("data/pickled.py", "math.prod(shape) != len(content)", "False", "another_size"),
]


TEST_FILES = sorted(set(TESTED_BY.values()))
UNCHANGED = Mutant("losses.py", "", "")


def label(mutant):
    old, new = (" ".join(phrase.split()) for phrase in (mutant.old, mutant.new))
    return f"{mutant.file}: {old} -> {new or 'nothing'}"


def names_that_catch(test_file):
    """pytest's -k for the tests of a file that a mutant relies on, and no other: some are slow."""
    names = {mutant.caught_by for mutant in MUTANTS if TESTED_BY[mutant.file] == test_file}
    return "" if "" in names else " or ".join(f"({name})" for name in sorted(names))


# The process that forks


def write_mutant(package, folder, mutant):
    """The package with one phrase changed: links to all else, and to what is compiled of it."""
    shutil.copytree(package, folder / "evenhand", copy_function=os.symlink)
    path = folder / "evenhand" / mutant.file
    text = path.read_text("utf-8").replace(mutant.old, mutant.new)
    for link in (path, *path.parent.glob(f"__pycache__/{path.stem}.*")):
        link.unlink()
    path.write_text(text, "utf-8")


def run_tests(folder, test_file, names):
    """In a process of its own: pytest on a copy of the package. Never returns."""
    log = os.open(folder / "log", os.O_CREAT | os.O_WRONLY)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.path.insert(0, str(folder))
    sys.dont_write_bytecode = True
    os.environ["EVENHAND_HYPOTHESIS_PROFILE"] = "quick"
    options = ["-x", "-q", "--tb=line", "-o", "addopts=", "-p", "no:cacheprovider", "-k", names]
    options += ["--assert=plain"]  # to rewrite the asserts of a file takes as long as to run them
    # A mutant is caught by a test that fails. What it leaves unclosed comes to light when the
    # garbage is collected: now or never, and after the last test as an error of pytest's own.
    options += ["-p", "no:unraisableexception", "-p", "no:threadexception"]
    status = pytest.main([*options, f"--timeout={SECONDS_FOR_A_TEST}", str(TESTS / test_file)])
    import evenhand

    assert Path(evenhand.__file__).is_relative_to(folder), evenhand.__file__
    os._exit(status)


def result_of(folder, wait_status):
    """(exit status of pytest or minus the signal, the line that says what failed)"""
    lines = (folder / "log").read_text("utf-8", errors="replace").splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return os.waitstatus_to_exitcode(wait_status), (failed or lines[-1:] or [""])[0]


def run_all(package, work_dir):
    """The package as it is, by each test file, then every mutant: [(status, line), ...]."""
    import hypothesis  # noqa: F401  (imported here once, for every fork)
    import numba  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch  # noqa: F401

    gc.freeze()  # or every fork would walk, and so copy, all of torch's objects
    jobs = [(UNCHANGED, name, names_that_catch(name)) for name in TEST_FILES]
    jobs += [(mutant, TESTED_BY[mutant.file], mutant.caught_by) for mutant in MUTANTS]
    waiting, running, results = list(enumerate(jobs)), {}, {}
    while waiting or running:
        while waiting and len(running) < NUM_WORKERS:
            number, (mutant, test_file, names) = waiting.pop(0)
            folder = work_dir / str(number)
            write_mutant(package, folder, mutant)
            process = os.fork()
            if not process:
                try:
                    run_tests(folder, test_file, names)
                except BaseException:
                    traceback.print_exc()
                    os._exit(99)
            running[process] = number, folder
        process, wait_status = os.wait()
        number, folder = running.pop(process)
        results[number] = result_of(folder, wait_status)
        shutil.rmtree(folder)
    return [results[number] for number in range(len(results))]


if __name__ == "__main__":
    memory = Path("/dev/shm")  # thousands of links are made quickly there
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as name:
        print(json.dumps(run_all(Path(sys.argv[1]), Path(name))))


# The tests


@pytest.fixture(scope="module")
def package():
    import evenhand

    return Path(evenhand.__file__).parent


@pytest.fixture(scope="module")
def results(package):
    if not hasattr(os, "fork"):
        pytest.skip("needs os.fork")
    answer = subprocess.run(
        [sys.executable, __file__, str(package)], capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stderr
    return json.loads(answer.stdout)


@pytest.mark.parametrize("mutant", MUTANTS, ids=label)
def test_every_mutant_can_be_made(package, mutant):
    count = (package / mutant.file).read_text("utf-8").count(mutant.old)
    assert count == 1, f"occurs {count} times in {mutant.file}: update MUTANTS, do not drop it"
    assert mutant.old != mutant.new


# The first of these tests waits for all processes.
takes_long = pytest.mark.timeout(900)


@pytest.mark.slow
@takes_long
@pytest.mark.parametrize("number", range(len(TEST_FILES)), ids=TEST_FILES)
def test_the_package_as_it_is_passes(results, number):
    status, line = results[number]
    assert status == 0, line


@pytest.mark.slow
@takes_long
@pytest.mark.parametrize("number", range(len(MUTANTS)), ids=[label(mutant) for mutant in MUTANTS])
def test_every_mutant_is_caught(results, number):
    status, line = results[len(TEST_FILES) + number]
    # 1 is "a test failed"; anything else (did not import, ran for ever) would prove nothing.
    assert status == 1, f"status {status}: {line or 'survived'}"
