"""What happens in `evenhand train`, from top to bottom.

open_data, open_fitted   the data set, and settings that fit it
begin_run                a new run folder; `resumable_config` for one that is to go on
train_run                the model (each step: training/loop.py), and then the ranker
evaluate_run             searches for every query of a part and scores what was found

See `run_folder` for what is in the folder, and how it is read.
"""

import copy
import dataclasses
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from evenhand.build import (
    build_training,
    check_against_data,
    check_ranker,
    encoder_inputs,
    table_dtype,
)
from evenhand.config import OWN, Config, DataConfig, build_config, to_toml
from evenhand.data import Dataset, Rows, open_dataset, save_dataset
from evenhand.data.dataset import check_all_ids, release_memory
from evenhand.data.weighting import weight_features
from evenhand.defaults import Choice, choices_table, fit_settings
from evenhand.distributed.ranks import ProcessRanks, Ranks, Shards, num_launched
from evenhand.distributed.search import evaluate_split
from evenhand.errors import StoppedError, UserError
from evenhand.evaluation import Outcome, Score, evaluate, score_table, selected_value
from evenhand.evaluation.baselines import load_baselines
from evenhand.evaluation.groups import BUILT_IN
from evenhand.files import atomic_folder, write_json, write_text
from evenhand.models import Retriever, features_of, inputs_of
from evenhand.progress import count_bar, step_bar
from evenhand.run_folder import (
    RunResult,
    about_run,
    check_trained_on,
    encoder_folder,
    has_model,
    is_of_predictions,
    load_model,
    load_result,
    open_weights,
    query_data_path,
    read_about,
    run_config,
    run_encoder,
    save_model,
    save_result,
)
from evenhand.run_search import (
    build_searcher,
    load_run_ranker,
    query_data_of,
    ranker_path,
)
from evenhand.search import (
    ExactIndex,
    HybridIndex,
    LinearRanker,
    label_index,
)
from evenhand.search.reranker import fit_ranker, hardest_labels, save_ranker
from evenhand.search.searcher import load_query_data, save_query_data
from evenhand.text_encoder import TextEncoder, cached_vectors, copy_encoder, vector_width
from evenhand.training.checkpoint import CheckpointManager, list_steps, load_latest_checkpoint
from evenhand.training.loop import rewind_metrics, train
from evenhand.training.state import Training
from evenhand.training.step import ChosenStep, refresh_labels

# --- data -----------------------------------------------------------------------------------------


def open_data(config: DataConfig, console: Console, *, folder: Path | None = None) -> Dataset:
    """The data set of a config; `places` is prepared the first time it is asked for.

    Args:
        folder: where it lies, if not where the config says; nothing is prepared there.
    """
    place = config.folder if folder is None else folder
    if folder is None and config.dataset == "places" and not place.exists():
        from evenhand.data.places import load_places

        with console.status(f"preparing {place} (once)"):
            least, num_buckets = config.min_population, config.num_buckets
            save_dataset(load_places(min_population=least, num_buckets=num_buckets), place)
    dataset = open_dataset(place)
    check_all_ids(dataset, place)
    return dataset if config.weighting == "as-is" else weight_features(dataset, config.weighting)


def open_run_data(
    run: Path,
    console: Console,
    *,
    data: str | Path | None = None,
    weighs_features: bool = True,
) -> Dataset:
    """The data set of a run: where its settings say, or else where it lay when it was trained.

    Args:
        data: the folder that --data names; no other is then looked at.
        weighs_features: False for values as they come, whatever the run's weighting.
    """
    config = run_config(run).data
    if not weighs_features:
        config = dataclasses.replace(config, weighting="as-is")
    if data is not None:
        return open_data(config, console, folder=Path(data))
    recorded = read_about(run)["dataset"].get("folder")
    places = [config.folder.absolute()]
    if isinstance(recorded, str) and Path(recorded) not in places:
        places.append(Path(recorded))
    found = next((place for place in places if (place / "dataset.json").exists()), None)
    if found is None and config.dataset != "places":
        raise UserError(
            f"the data set of {run} is not there: no dataset.json in "
            f"{' nor in '.join(map(str, places))}; name its folder with --data"
        )
    return open_data(config, console, folder=None if found == places[0] else found)


def open_fitted(
    given: Mapping[str, Mapping[str, Any]],
    console: Console,
    *,
    device: torch.device,
    encoder: nn.Module | None = None,
) -> tuple[Dataset, Config, list[Choice]]:
    """The data set of some settings, and all settings: what is not given is chosen to fit the data.

    What was chosen is shown, with the reasons.

    Args:
        encoder: a module of your own.
    """
    raw = DataConfig(**{**given["data"], "weighting": "as-is"})  # weighted as is chosen
    dataset = open_data(raw, console)
    width, model = 0, {**given.get("model", {})}
    if encoder is not None:
        model["encoder"] = OWN
        has_texts = all(part.texts is not None for part in dataset.parts.values())
        model.setdefault("input", "texts" if has_texts else "features")
    elif model.get("encoder") == OWN:
        raise UserError(
            f'model.encoder = "{OWN}" is a module given in Python: '
            f"evenhand.train(..., encoder=module)"
        )
    elif model.get("encoder"):
        model["encoder"], model["input"] = str(Path(model["encoder"]).absolute()), "texts"
        encoder = TextEncoder(Path(model["encoder"]))
    if encoder is not None:
        inputs = {"encoder": OWN, "input": model["input"]}
        probed = encoder_inputs(build_config({"model": inputs}), dataset).parts["train"]
        probe = features_of(probed, np.arange(1), device=_device_of(encoder))
        width = vector_width(encoder, probe)
    fitted: Any = {"device": device, "num_ranks": num_launched(), "encoder_width": width}
    config, choices = fit_settings({**given, "model": model}, dataset, **fitted)
    if choices:
        console.print(choices_table(choices))
    if config.data.weighting != "as-is":
        dataset = weight_features(dataset, config.data.weighting)
    return dataset, config, choices


def _device_of(module: nn.Module) -> torch.device:
    return next((weight.device for weight in module.parameters()), torch.device("cpu"))


# --- training -------------------------------------------------------------------------------------


def default_folder(config: Config, dataset: Dataset) -> Path:
    """Where a run goes that was given no folder."""
    name = f"{dataset.name}-{config.mining.method}-seed{config.training.seed}"
    return Path("runs") / name


def check_new(folder: Path) -> None:
    """Refuses a folder that is there already."""
    if folder.exists() or folder.is_symlink():  # a link may lead nowhere, or to itself
        raise UserError(
            f"{folder} exists already; choose another --run folder, continue it with --resume, or "
            f"remove it first"
        )


def begin_run(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    choices: Sequence[Choice] = (),
) -> None:
    """Makes a new run folder that says what will be run; an existing one is never touched.

    Settings that the data cannot meet are refused first, and a folder is made whole or not at all.

    Args:
        choices: the settings that a rule chose, whose reasons are written beside them.
    """
    check_new(folder)
    check_against_data(config, dataset)
    command = f"evenhand train {shlex.quote(str(folder / 'config.toml'))}"
    reasons = {choice.name: choice.reason for choice in choices}
    with atomic_folder(folder) as staging:
        write_text(staging / "config.toml", f"# {command}\n{to_toml(config, reasons)}")
        write_json(staging / "run.json", about_run(folder, config, dataset, device))
        if config.model.encoder not in ("", OWN):
            copy_encoder(Path(config.model.encoder), encoder_folder(staging))


def resumable_config(folder: Path, config: Config | None, dataset: Dataset | None = None) -> Config:
    """The config of a run that is to go on; another config or data set is refused."""
    if not (folder / "config.toml").exists():
        raise UserError(f"{folder} cannot be resumed: it holds no config.toml")
    saved = run_config(folder)
    if is_of_predictions(folder):
        raise UserError(f"{folder} holds the predictions of another model: nothing to train")
    if config is not None and config != saved:
        ours, theirs = dataclasses.asdict(config), dataclasses.asdict(saved)
        name, ours_value, theirs_value = next(
            (f"{section}.{key}", ours[section][key], value)
            for section, values in theirs.items()
            for key, value in values.items()
            if ours[section][key] != value
        )
        raise UserError(
            f"{folder} was begun with {name} = {theirs_value!r}, and now it is {ours_value!r}; "
            f"resume it with its own settings (evenhand train --resume --run {folder}) or choose "
            f"another --run folder"
        )
    if dataset is not None:
        check_trained_on(folder, dataset)
    return saved


def train_run(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    title: str = "training",
    should_stop_fn: Callable[[], bool] = lambda: False,
    ranks: ProcessRanks | None = None,
    keeps_checkpoints: bool = False,
    encoder: nn.Module | None = None,
) -> bool:
    """Trains into a run folder, from its newest checkpoint where there is one, then fits a ranker.

    A run that is finished is left as it is.

    Args:
        ranks: those that train together, each in this function.
        keeps_checkpoints: else they are removed when all is complete.
        encoder: a module of your own, trained in place.

    Returns:
        Whether all is complete; if not, it was asked to stop and can be resumed.
    """
    is_first = ranks is None or ranks.rank == 0
    has_ranker = config.ranker.num_mined_labels > 0
    if is_first and not query_data_path(folder).exists():
        save_query_data(query_data_path(folder), query_data_of(dataset, config))
    if not is_finished(folder, config):
        how: Any = {"device": device, "console": console, "should_stop_fn": should_stop_fn}
        if not (has_ranker and is_trained(folder)):
            ranker_path(folder).unlink(missing_ok=True)  # it would be that of another model
            how_run: Any = {"title": title, "ranks": ranks, "encoder": encoder}
            if not _train_model(folder, config, dataset, **how, **how_run):
                return False
        if has_ranker and not _fit_run_ranker(folder, config, dataset, **how):
            return False
    # Only now, when the model is on the disk and run.json says so, are they of no more use.
    if is_first and not keeps_checkpoints:
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    release_memory(dataset)
    return True


def is_finished(folder: Path, config: Config) -> bool:
    """Whether there is nothing left to train: run.json says so, and the model is there."""
    has_ranker = not config.ranker.num_mined_labels or ranker_path(folder).is_file()
    return bool(read_about(folder).get("is_complete")) and has_model(folder) and has_ranker


def check_unfinished(folder: Path, config: Config, dataset: Dataset) -> None:
    """Refuses to resume a run that has all that `evenhand train` makes."""
    parts = [part for part in ("test", "validation") if part in dataset.parts][:1]
    evaluated = [folder / "evaluation" / part / "scores.json" for part in parts]
    if is_finished(folder, config) and all(
        path.exists() for path in (query_data_path(folder), *evaluated)
    ):
        name = shlex.quote(str(folder))
        raise UserError(
            f"{folder} is finished, and there is nothing to resume; to train longer, begin anew: "
            f"evenhand train {name}/config.toml --steps {2 * config.training.num_steps} "
            f"--run {name}-longer"
        )


def is_trained(folder: Path) -> bool:
    """Whether the model is complete, and only the ranker may be missing."""
    return "best_step" in read_about(folder) and has_model(folder)


def _train_model(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    title: str,
    should_stop_fn: Callable[[], bool],
    ranks: ProcessRanks | None,
    encoder: nn.Module | None,
) -> bool:
    """Trains to the end, or until asked to stop: False. run.json says what was done."""
    encoder = run_encoder(folder, config, encoder)
    if encoder is not None and config.model.freeze_encoder:
        dataset = _with_vectors(dataset, config, encoder.to(device), console)
    built = build_training(config, dataset, device, ranks=ranks, encoder=encoder)
    training, plan = built.training, built.plan
    if config.model.init_from and not list_steps(folder / "checkpoints"):
        begin_from(Path(config.model.init_from), training.model, dataset)
    is_first = ranks is None or ranks.rank == 0
    warnings = _load_checkpoint(folder, training, ranks)
    chosen, began_at = built.choose_step(should_stop_fn), training.step
    if is_first:
        lost_steps = rewind_metrics(folder / "metrics.jsonl", step=began_at)
        _note_start(folder, chosen, began_at, lost_steps, warnings)
    for line in (*(f"evenhand: {warning}" for warning in warnings), chosen.describe()):
        console.print(line, markup=False)
    has_validation = "validation" in dataset.parts and plan.evaluate_every > 0
    began = time.monotonic()
    keeper = CheckpointManager(
        folder / "checkpoints",
        keep_last=config.training.keep_last,
        keep_best=config.training.keep_best,
        ranks=ranks,
    )

    def validate() -> tuple[float, dict[str, float]]:
        refresh_labels(training)
        value, figures = _validate(training.model, config, dataset, ranks)
        if value > training.best_value:
            save_model(folder, training.model, ranks=ranks)
        return value, figures

    with step_bar(console, title, total=plan.num_steps, done=began_at) as advance:
        is_complete = train(
            training,
            plan,
            chosen.step,
            metrics_path=folder / "metrics.jsonl" if is_first else None,
            keeper=keeper,
            validate_fn=validate if has_validation else None,
            progress_fn=advance,
            warn_fn=lambda warning: console.print(f"evenhand: {warning}", markup=False),
            should_stop_fn=chosen.should_stop_fn,
            ranks=ranks,
        )
    if is_complete and not has_validation:
        refresh_labels(training)
        save_model(folder, training.model, ranks=ranks)
    if is_complete and 0 < training.best_step < training.step:
        ended = f"ended at step {training.step:,} of {plan.num_steps:,}"
        console.print(f"{ended}; the model is that of step {training.best_step:,}, the best look")
    if not is_first:
        return is_complete
    seconds, num_steps = time.monotonic() - began, training.step - began_at
    about = read_about(folder) | {"is_running": False}
    if num_steps:  # else it was complete already
        about["training_seconds"] = round(seconds + about.get("training_seconds", 0.0), 1)
        about["milliseconds_a_step"] = round(1000 * seconds / num_steps, 2)
    if ranks is not None:
        about["num_ranks"] = ranks.num_ranks
        if num_steps:
            sent = {what: round(count / num_steps) for what, count in ranks.sent.items()}
            about["bytes_sent_a_step"] = sent
    if is_complete:
        about["is_complete"] = config.ranker.num_mined_labels == 0
        about |= {"num_steps": training.step, "best_step": training.best_step or training.step}
    write_json(folder / "run.json", about)
    return is_complete


def begin_from(folder: Path, model: Retriever, dataset: Dataset) -> None:
    """Fills a model with the weights of a run, its labels by their names; new ones stay as made."""
    saved, source = open_weights(folder), load_query_data(query_data_path(folder))
    known, own = source.label_names, dataset.label_names
    if known is None or own is None:
        raise UserError(f"{folder} and {dataset.name} must both have labels with names")
    row_of = {name: row for row, name in enumerate(known)}
    pairs = [(row, row_of[name]) for row, name in enumerate(own) if name in row_of]
    rows, sources = torch.tensor(pairs, dtype=torch.int64).view(-1, 2).unbind(1)
    for name, target in model.state_dict().items():
        shape = saved.entries[name].shape if name in saved.entries else None
        is_of_labels = name.startswith("label_") and not name.startswith("label_tower.")
        if is_of_labels and shape is not None and shape[1:] == target.shape[1:]:
            target[rows.to(target.device)] = saved.load(name)[sources].to(target)
        elif shape == tuple(target.shape):
            saved.read(name, target)
        elif not is_of_labels or name == "label_table":
            raise UserError(
                f"--init-from {folder}: its {name} is {shape or 'not there'}, and this run's is "
                f"{tuple(target.shape)}; take the same encoder, and features as "
                f"{source.featurizer} (--features, --num-buckets, ...)"
            )


def _with_vectors(
    dataset: Dataset, config: Config, encoder: nn.Module, console: Console
) -> Dataset:
    """The vectors of a frozen encoder in place of the texts that are read again and again."""
    dataset = encoder_inputs(config, dataset)
    parts = dict(dataset.parts)
    for name in parts.keys() & {"train", "validation"}:
        texts = parts[name].texts
        assert texts is not None
        with count_bar(console, f"vectors of {name} (texts)") as advance:
            vectors = cached_vectors(texts, encoder, config.data.folder, advance)
        own: Any = {"features": vectors, "is_read_as_text": False}
        parts[name] = dataclasses.replace(parts[name], **own)
    return dataclasses.replace(dataset, parts=parts)


def _load_checkpoint(folder: Path, training: Training, ranks: ProcessRanks | None) -> list[str]:
    """Continues from the newest sound checkpoint, if any; sentences on those that are not."""
    warnings: list[str] = []
    checkpoint = load_latest_checkpoint(
        folder / "checkpoints",
        training.checkpoint(),
        ranks=ranks,
        check_fn=training.check_belongs,
        warn_fn=warnings.append,
    )
    try:
        if checkpoint is not None:
            training.load(checkpoint)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise UserError(
            f"the newest of {folder / 'checkpoints'} is damaged, or of another version "
            f"({type(error).__name__}: {error}); remove it, and --resume will begin anew"
        ) from error
    return warnings


def _note_start(
    folder: Path, chosen: ChosenStep, step: int, lost_steps: int, warnings: Sequence[str]
) -> None:
    """Notes in run.json that it runs, by which step, and what an end without warning cost."""
    about = read_about(folder)
    if about.get("is_running") or warnings:
        before = about.get("interruptions")
        interruption = {
            "resumed_at_step": step,
            "lost_steps": lost_steps,  # by what was logged; they are trained once more
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "damaged_checkpoints": list(warnings),
        }
        about["interruptions"] = [*(before if isinstance(before, list) else ()), interruption]
    about["step"] = {"kind": chosen.kind} | ({"reason": chosen.reason} if chosen.reason else {})
    write_json(folder / "run.json", about | {"is_running": True, "is_complete": False})


def _validate(
    model: Retriever, config: Config, dataset: Dataset, ranks: Ranks | None
) -> tuple[float, dict[str, float]]:
    """The value to select by, and every validation figure to be logged: by the model alone.

    Votes of neighbours would be the same each time, and take longer than the rest.
    """
    search = dataclasses.replace(config.search, num_neighbours=0)
    config = dataclasses.replace(config, search=search)
    outcome = evaluate_model(model, dataset, "validation", config, ranks=ranks)
    scores = _scores_of(outcome, dataset, "validation", config, num_resamples=0)
    shown = f"recall@{10 if 10 in outcome.cutoffs else outcome.cutoffs[-1]}"
    figures = {}
    for score in scores:
        if score.metric != shown or np.isnan(score.value):
            continue
        if score.column == "all":
            figures[shown] = score.value
        elif score.column not in BUILT_IN and score.group in ("worst 3", "worst tenth"):
            figures[f"{shown} on {score.group} of {score.column}"] = score.value
    value = selected_value(scores, config.training.select_by)
    return value, figures | {config.training.select_by: value}


# --- the ranker -----------------------------------------------------------------------------------


def _fit_run_ranker(
    folder: Path,
    config: Config,
    dataset: Dataset,
    *,
    device: torch.device,
    console: Console,
    should_stop_fn: Callable[[], bool],
) -> bool:
    """Fits the ranker of a trained run and completes it; False: it was asked to stop."""
    about = read_about(folder)
    if not ranker_path(folder).is_file():
        began = time.monotonic()
        model = load_model(folder, dataset, device=device)
        try:
            ranker = mine_and_fit_ranker(
                model, dataset, config, console=console, should_stop_fn=should_stop_fn
            )
        except StoppedError:
            return False
        assert ranker is not None
        save_ranker(ranker_path(folder), ranker)
        about["ranker_seconds"] = round(time.monotonic() - began, 1)
    write_json(folder / "run.json", about | {"is_complete": True})
    return True


def mine_and_fit_ranker(
    model: Retriever,
    dataset: Dataset,
    config: Config,
    *,
    console: Console,
    should_stop_fn: Callable[[], bool] = lambda: False,
) -> LinearRanker | None:
    """A ranker for a trained model, if the config asks for one: mined with the model alone.

    The neighbours have no part in it: the nearest training query of a training query is itself.

    Raises:
        StoppedError: it was asked to stop; what is finished is not kept.
    """
    settings, part = config.ranker, dataset.parts["train"]
    if not settings.num_mined_labels:
        return None
    check_ranker(config, dataset)
    assert isinstance(part.features, Rows)
    if model.label_table.dtype != torch.float32:
        model = copy.deepcopy(model).float()
    device = model.label_table.device

    def or_stop(advance: Callable[[int, int], None], done: int, total: int) -> None:
        advance(done, total)
        if done < total and should_stop_fn():
            raise StoppedError

    with torch.no_grad(), count_bar(console, "mining labels (queries)") as advance:
        mined = hardest_labels(
            lambda row_ids: model.query_vectors(features_of(part, row_ids, device=device)),
            ExactIndex(model.label_vectors(), label_bias=model.biases()),
            part.positives,
            settings.num_mined_labels,
            progress_fn=partial(or_stop, advance),
        )
    with count_bar(console, "fitting the ranker (pairs)") as advance:
        return fit_ranker(
            part.features,
            part.positives,
            mined,
            num_features=dataset.num_features,
            num_labels=dataset.num_labels,
            positive_cost=settings.positive_cost,
            negative_cost=settings.negative_cost,
            smallest_weight=settings.smallest_weight,
            seed=config.training.seed,
            progress_fn=partial(or_stop, advance),
        )


# --- evaluation -----------------------------------------------------------------------------------


def evaluate_model(
    model: Retriever,
    dataset: Dataset,
    part_name: str,
    config: Config,
    *,
    ranker: LinearRanker | None = None,
    progress_fn: Callable[[int, int], None] | None = None,
    ranks: Ranks | None = None,
) -> Outcome:
    """Searches all labels for every query of a part; without a ranker, by the model alone.

    With ranks, the model is this rank's rows of it: all ranks evaluate together, each the whole.
    """
    dataset = encoder_inputs(config, dataset)
    cutoffs = config.evaluation.cutoffs
    shown: Any = {"num_results": max(cutoffs), "cutoffs": cutoffs, "progress": progress_fn}
    if ranks is not None:
        if config.search.num_neighbours or ranker is not None:
            raise UserError(
                "neighbours and rankers are for one process, and the model is split between "
                f"{ranks.num_ranks}; evaluate it without torchrun"
            )
        first, last = Shards(dataset.num_labels, ranks.num_ranks).rows_of(ranks.rank)
        counts = dataset.label_counts()[first:last]
        discount = config.search.frequency_discount
        own_index = label_index(model, label_counts=counts, frequency_discount=discount)
        return evaluate_split(model, own_index, dataset, part_name, ranks=ranks, **shown)
    part = dataset.parts[part_name]
    data = query_data_of(dataset, config, weighs_features=False)
    searcher = build_searcher(model, data, config, ranker)
    assert isinstance(searcher.index, ExactIndex | HybridIndex)
    return evaluate(
        lambda row_ids: searcher.prepare(inputs_of(part, row_ids)),
        searcher.index,
        part,
        dataset.label_counts(),
        num_train_queries=len(dataset.parts["train"]),
        **shown,
    )


def _scores_of(
    outcome: Outcome, dataset: Dataset, part_name: str, config: Config, *, num_resamples: int
) -> list[Score]:
    min_pairs = config.evaluation.min_pairs
    return score_table(
        outcome, dataset, part_name, min_pairs=min_pairs, num_resamples=num_resamples
    )


def evaluate_run(
    folder: Path,
    dataset: Dataset,
    part_name: str,
    *,
    device: torch.device,
    console: Console,
    title: str | None = None,
    ranks: Ranks | None = None,
    encoder: nn.Module | None = None,
) -> list[Score]:
    """Evaluates a trained run on a part and writes the result into its folder.

    With ranks, all of them together, each with its rows of the model; the first one writes.
    """
    if part_name not in dataset.parts:
        raise UserError(
            f"{dataset.name} has no {part_name} part; it has {', '.join(dataset.parts)}"
        )
    config = run_config(folder)
    how: Any = {"device": device, "dtype": table_dtype(config), "ranks": ranks, "config": config}
    model = load_model(folder, dataset, encoder=encoder, **how)
    ranker = load_run_ranker(folder, config, dataset)
    with count_bar(console, title or f"evaluating {folder} on {part_name}") as advance:
        outcome = evaluate_model(
            model, dataset, part_name, config, ranker=ranker, progress_fn=advance, ranks=ranks
        )
    del model, ranker
    release_memory(dataset)
    with console.status("intervals"):
        count = config.evaluation.num_resamples
        scores = _scores_of(outcome, dataset, part_name, config, num_resamples=count)
    if ranks is None or ranks.rank == 0:
        save_result(folder, part_name, outcome, scores)
    return scores


def validation_value(
    folder: Path, dataset: Dataset, config: Config, *, device: torch.device
) -> float:
    """The score that `training.select_by` names, of a run with its votes, handicap and ranker.

    Args:
        config: that of the run, or another that differs in what is added to its scores.
    """
    model = load_model(folder, dataset, device=device)
    ranker = load_run_ranker(folder, config, dataset)
    outcome = evaluate_model(model, dataset, "validation", config, ranker=ranker)
    scores = _scores_of(outcome, dataset, "validation", config, num_resamples=0)
    return selected_value(scores, config.training.select_by)


def open_result(folder: Path, dataset: Dataset, part_name: str = "test") -> RunResult:
    """An evaluated run with the baselines beside it, which are made once."""
    check_trained_on(folder, dataset)
    result = load_result(folder, part_name)
    place, cutoffs = folder / "evaluation" / part_name, result.outcome.cutoffs
    baselines = load_baselines(place, dataset, part_name, cutoffs)
    return dataclasses.replace(result, baselines=baselines)
