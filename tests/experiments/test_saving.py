"""Saved models: documented paths, a frequency per role, complete folders, and no waiting except for a copy."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial
from types import SimpleNamespace

import pytest

from areno.config.experiment import SFTConfig, config_from
from areno.errors import CheckpointError, UsageError
from areno.experiments.folders import ExperimentFolders, open_log
from areno.observability.logs import LoggingSetup
from areno.spec import Frequency
from areno.storage.run_lock import run_lock
from areno.training.frequency import StepInfo
from areno.training.saving import Saver
from tests.config.experiment.samples import SFT, changed

AT = StepInfo(1, 2, 6, 4, 20)


def every(steps):
    return Frequency(steps=steps, last=True)


def writer(text="weights"):
    return lambda folder: (folder / "model.safetensors").write_text(text)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_experiment_folders_are_as_documented_and_reading_their_paths_creates_nothing(tmp_path):
    folders = ExperimentFolders(tmp_path / "root", "exp", "trial", user="me")
    assert folders.logs == tmp_path / "root/logs/me/exp/trial"
    assert folders.checkpoints == tmp_path / "root/checkpoints/me/exp/trial"
    assert folders.run_dir.log_path == folders.logs / "main.log"
    assert names(tmp_path) == []
    for _ in range(2):
        run_dir = folders.create()
    saved = Saver(folders.checkpoints, every(1)).save("default", AT, writer())
    assert saved == folders.checkpoints / "default/epoch1epochstep2globalstep6"
    assert (run_dir.checkpoints_path / "default/epoch1epochstep2globalstep6/model.safetensors").read_text() == "weights"
    os.rename(tmp_path / "root", tmp_path / "moved")
    assert (tmp_path / "moved/logs/me/exp/trial/checkpoints/default").is_dir()  # the link is relative


def test_a_fileroot_that_cannot_be_used_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match=r"fileroot .*cluster\.fileroot"):
        ExperimentFolders(tmp_path / "file", "e", "t").create()


def test_a_file_or_dangling_link_in_the_run_directory_is_named(tmp_path):
    folders = ExperimentFolders(tmp_path, "e", "t")
    folders.logs.mkdir(parents=True)
    remedy = r"choose another trial_name or cluster\.fileroot$"
    (folders.logs / "events").touch()
    with pytest.raises(UsageError, match=rf"cannot create {folders.logs / 'events'} \(File exists\); {remedy}"):
        folders.create()
    (folders.logs / "events").unlink()
    folders.run_dir.checkpoints_path.unlink()
    folders.run_dir.checkpoints_path.symlink_to("gone/away")
    with pytest.raises(UsageError, match=rf"cannot create {folders.logs / 'checkpoints'} .*{remedy}"):
        folders.create()


def test_each_role_is_saved_at_its_own_frequency(tmp_path):
    """A shared counter would save the critic at each step, and the actor never."""
    saver = Saver(tmp_path, every(2), roles=("default", "critic"))
    at, saved = StepInfo(0, 0, 0, 10, 5), {"default": [], "critic": []}
    for _ in range(5):
        for role, steps in saved.items():
            if saver.save_if_due(role, at, writer()):
                steps.append(at.global_step)
        at = at.next()
    assert saved == {"default": [1, 3, 4], "critic": [1, 3, 4]}  # every second one, and the last
    assert (
        names(tmp_path / "default")
        == names(tmp_path / "critic")
        == [f"epoch0epochstep{g}globalstep{g}" for g in (1, 3, 4)]
    )


def test_counters_of_a_recovered_saver_continue(tmp_path):
    first = Saver(tmp_path, every(2))
    assert first.save_if_due("default", StepInfo(0, 0, 0, 9, 9), writer()) is None
    second = Saver(tmp_path, every(2), roles=("default", "critic"))
    second.load_state_dict(first.state_dict())
    assert second.save_if_due("default", StepInfo(0, 0, 0, 9, 9).next(), writer()) is not None
    assert second.save_if_due("critic", StepInfo(0, 0, 0, 9, 9).next(), writer()) is None


@pytest.mark.parametrize("mode", ["async", "auto"])
def test_asynchronous_saving_blocks_only_for_the_copy_and_writes_the_copy(tmp_path, mode):
    weights, may_write = ["old"], threading.Event()

    def stage():
        copied = weights[0]

        def write(folder):
            assert may_write.wait(30)
            writer(copied)(folder)

        return write

    saver = Saver(tmp_path, every(1), mode=mode)
    path = saver.save("default", AT, writer("not this one"), stage=stage)  # returns while the writer still waits
    assert not path.exists()
    weights[0] = "new"
    may_write.set()
    saver.close()
    assert (path / "model.safetensors").read_text() == "old"
    assert names(path.parent) == [path.name]


@pytest.mark.parametrize(("mode", "warns"), [("auto", False), ("async", True), ("sync", False)])
def test_what_cannot_be_copied_is_written_before_training_goes_on(tmp_path, caplog, mode, warns):
    path = Saver(tmp_path, every(1), mode=mode).save("default", AT, writer())
    assert (path / "model.safetensors").read_text() == "weights"
    assert ("training waits" in caplog.text) is warns


def test_a_failed_asynchronous_save_is_reported_at_the_next_one(tmp_path):
    def fail(folder):
        raise OSError("no space left on device")

    saver = Saver(tmp_path, every(1))
    saver.save("default", AT, writer(), stage=lambda: fail)
    with pytest.raises(CheckpointError, match="no space left"):
        saver.save("default", AT.next(), writer(), stage=lambda: writer())
    saver.close()
    assert names(tmp_path / "default") == []


def test_a_save_killed_before_its_rename_leaves_no_model_and_its_files_are_removed_later(tmp_path):
    child = os.fork()
    if child == 0:

        def die(folder):
            writer("half")(folder)
            os.kill(os.getpid(), signal.SIGKILL)

        Saver(tmp_path, every(1)).save("default", AT, die)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert all(name.startswith(".") for name in names(tmp_path / "default"))
    saver = Saver(tmp_path, every(1))
    saver.save("default", AT, writer())
    assert names(tmp_path / "default") == ["epoch1epochstep2globalstep6"]


@pytest.mark.parametrize("tied", [False, True])
def test_a_copied_model_is_written_unchanged_while_the_original_is_trained(tmp_path, tiny_checkpoint, tied):
    import torch

    from areno.engine.model.loading import LoadOptions
    from areno.engine.role import load_role
    from areno.text.chat import load_tokenizer

    role = load_role("actor", str(tiny_checkpoint), "policy", LoadOptions(dtype=torch.float32), None, False)
    role.model.module.config.tie_word_embeddings = tied
    if tied:
        role.model.module.tie_weights()
    module = role.model.module
    assert (module.get_input_embeddings().weight is module.get_output_embeddings().weight) is tied
    tokenizer = load_tokenizer(str(tiny_checkpoint))
    role.save_model(tmp_path / "before", tokenizer)
    saver = Saver(tmp_path / "saved", every(1), mode="async")
    path = saver.save(
        "default", AT, partial(role.save_model, tokenizer=tokenizer), stage=partial(role.stage_model, tokenizer)
    )
    with torch.no_grad():
        for parameter in role.model.module.parameters():
            parameter.add_(1)
    saver.close()
    assert names(path) == names(tmp_path / "before")
    for file in names(path):
        assert (path / file).read_bytes() == (tmp_path / "before" / file).read_bytes(), file


def test_errors_of_an_unknown_mode_and_a_full_disk_name_the_remedy(tmp_path, monkeypatch):
    with pytest.raises(UsageError, match=r"saver\.mode='fast'.*auto, sync, async"):
        Saver(tmp_path, every(1), mode="fast")
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=0))
    with pytest.raises(CheckpointError, match=r"saver\.freq_"):
        Saver(tmp_path, every(1)).save("default", AT, writer())


def experiment(root, **more):
    return config_from(changed(SFT, {"cluster.fileroot": str(root), **more}), SFTConfig)


def test_a_trial_is_run_by_one_process_at_a_time(tmp_path):
    config = experiment(tmp_path)
    held = ExperimentFolders(tmp_path, config.experiment_name, config.trial_name).logs
    with run_lock(held, ""):
        with (
            pytest.raises(UsageError, match=rf"process {os.getpid()} on .*choose another trial_name"),
            open_log(config),
        ):
            raise AssertionError("must not be reached")
        with open_log(experiment(tmp_path, trial_name="other")), open_log(experiment(tmp_path, trial_name="other")):
            pass  # the run and its trainer
    with open_log(config):
        pass


def test_checkpoints_in_a_separate_root_are_locked_too(tmp_path):
    first, second = (experiment(tmp_path / name, **{"recover.fileroot": str(tmp_path / "all")}) for name in "ab")
    with open_log(first):
        active, LoggingSetup.active = LoggingSetup.active, None  # as in another process
        with pytest.raises(UsageError, match=r"process .* is writing to"), open_log(second):
            raise AssertionError("must not be reached")
        LoggingSetup.active = active


def test_two_spellings_of_a_separate_root_are_locked_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for saver, recover in ((f"{tmp_path}/all", "~/all"), (f"{tmp_path}/all/", f"{tmp_path}/all"), ("~", str(tmp_path))):
        with open_log(experiment(tmp_path, **{"saver.fileroot": saver, "recover.fileroot": recover})):
            pass


def test_only_the_user_can_access_the_default_root(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    config = config_from(SFT, SFTConfig)
    run_dir = ExperimentFolders(config.cluster.fileroot, "e", "t", user="me").create()
    root = tmp_path / ".local/share/areno"
    assert run_dir.path == root / "logs/me/e/t"
    assert root.stat().st_mode & 0o777 == 0o700
