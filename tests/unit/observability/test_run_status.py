"""status.json says how a run ended, whatever ended it, and is refused by name where it was damaged."""

import pytest

from megatron_rl.errors import ConfigError
from megatron_rl.observability.run_status import STATUS_FILE, RunState, kept_status, read_status, write_status


@pytest.mark.parametrize(("error", "leaves", "state"), [
    (None, False, "ended"), (None, True, "preempted"), (KeyboardInterrupt, False, "stopped"), (OSError, True, "failed"),
])
def test_the_end_of_a_run_is_told_and_its_error_passes(tmp_path, error, leaves, state):
    write_status(tmp_path, RunState.RUNNING, 12)
    assert read_status(tmp_path).state == "running"
    try:
        with kept_status(tmp_path, 12, is_main=True, leaves=lambda: leaves):
            if error is not None:
                raise error
    except (KeyboardInterrupt, OSError) as raised:
        assert type(raised) is error
    else:
        assert error is None
    assert (read_status(tmp_path).state, read_status(tmp_path).total_steps) == (state, 12)


@pytest.mark.parametrize(("text", "said"), [
    ("{", "status.json"),
    ("[]", "must be an object"),
    ('{"state": "gone", "total_steps": 1, "at": 0}', "state must be one of running, ended, preempted"),
    ('{"state": "ended", "total_steps": -1, "at": 0}', "total_steps must be at least 0"),
    ('{"state": "ended", "total_steps": 1}', "lacks the field at"),
])
def test_a_damaged_file_is_named(tmp_path, text, said):
    assert read_status(tmp_path) is None
    (tmp_path / STATUS_FILE).write_text(text)
    with pytest.raises(ConfigError, match=said):
        read_status(tmp_path)
