"""`evenhand export`."""

from pathlib import Path
from typing import Annotated, Literal

from evenhand.cli import options
from evenhand.cli.options import flag
from evenhand.errors import UserError


def export(
    run: options.RunFolder,
    out: Annotated[Path, flag("Folder to write, which must not exist.")],
    format: Annotated[
        Literal["npy", "parquet", "onnx", "pt2"],
        flag("Vectors as npy or parquet, or the query encoder as onnx or pt2 (torch.export)."),
    ] = "npy",
    shards: Annotated[
        int | None, flag("Files of label vectors.", show_default="each below 1 GiB")
    ] = None,
    queries: Annotated[
        options.PartName | None, flag("Part of the data whose query vectors are written as well.")
    ] = None,
    data: options.MovedData = None,
    device: options.Device = None,
) -> None:
    """Write a run's vectors as files for any vector store, or its query encoder for any program."""
    from evenhand.build import choose_device
    from evenhand.cli.console import console
    from evenhand.export_vectors import export_run
    from evenhand.progress import count_bar
    from evenhand.run_folder import query_data_path, run_config
    from evenhand.runs import open_run_data
    from evenhand.search.searcher import load_query_data

    if format in ("onnx", "pt2"):
        if shards is not None or queries is not None:
            raise UserError(f"--shards and --queries are for vectors, not for --format {format}")
        _export_encoder(run, out, format, data)
        return
    config, path = run_config(run), query_data_path(run)
    needs_data = queries is not None or data is not None or not path.exists()
    source = open_run_data(run, console, data=data) if needs_data else load_query_data(path)
    with count_bar(console, f"exporting {run}") as advance:
        manifest = export_run(
            run,
            out,
            source,
            file_format=format,
            num_shards=shards,
            part_name=queries,
            device=choose_device(device),
            progress_fn=advance,
        )
    size = sum(file["num_bytes"] for file in manifest["files"]) / 1e6
    console.print(
        f"{manifest['num_labels']:,} label vectors of {manifest['dimension']} dimensions"
        + (f" and {manifest['num_queries']:,} query vectors" if queries else "")
        + f", {size:,.1f} MB in {len(manifest['files'])} files; metric: {manifest['metric']}"
    )
    if config.search.num_neighbours or config.ranker.num_mined_labels:
        console.print("these are the model's vectors; what neighbours or a ranker add is not there")
    console.print(f"written to {out}; manifest.json says what is where")


def _export_encoder(run: Path, out: Path, format: str, data: Path | None) -> None:
    from evenhand.cli.console import console
    from evenhand.export_encoder import export_encoder
    from evenhand.runs import open_run_data

    dataset = open_run_data(run, console, data=data, weighs_features=False)
    manifest = export_encoder(run, out, dataset, file_format=format)
    console.print(
        f"{manifest['encoder']}: {', '.join(manifest['inputs'])} -> vectors of "
        f"{manifest['dimension']} dimensions"
    )
    if manifest["checked_by"] is None:
        console.print("not checked: onnxruntime is not installed")
    else:
        console.print(
            f"checked by {manifest['checked_by']} on {manifest['num_queries']} queries: the "
            f"largest difference from the model is {manifest['largest_difference']:.1g}"
        )
    console.print(f"written to {out}; manifest.json says what is where")
