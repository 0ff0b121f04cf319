from click.testing import CliRunner

import tensorpager
from tensorpager.pager.cli import main


def test_version() -> None:
    result = CliRunner().invoke(main, ["--version"])
    assert result.exit_code == 0
    assert tensorpager.__version__ in result.output
