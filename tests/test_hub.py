"""Checkpoints on a hub, a local server that speaks its API: what is asked for, when, and what is done when it
fails."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from minidflash.weights.safetensors_io import INDEX, SINGLE

from minidflash import pair as pair_module
from minidflash.errors import UserError
from minidflash.pair import open_pair
from tests.automaton import build
from tests.hub_server import serve
from tests.test_contract import edit

constants = pytest.importorskip("huggingface_hub.constants")
file_download = pytest.importorskip("huggingface_hub.file_download")
ROOT = Path(__file__).resolve().parent.parent
IDS = "some/target", "some/drafter"


@pytest.fixture
def folders(tmp_path):
    return build(tmp_path / "pair")


@pytest.fixture
def hub(folders, tmp_path, monkeypatch):
    """The server with a pair on it, for the client of this process and those that it starts."""
    with serve() as (hub, url):
        for repo, folder in zip(IDS, folders, strict=True):
            hub.add(repo, folder)
        cache = tmp_path / "hub"
        for name, value in {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HOME": str(tmp_path)}.items():
            monkeypatch.setenv(name, value)
        for name in ("HF_HUB_OFFLINE", "HF_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {
            "ENDPOINT": url, "HUGGINGFACE_CO_URL_TEMPLATE": url + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": False,
            "HF_TOKEN_PATH": str(tmp_path / "token"),
        }.items():  # fmt: skip
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(file_download.time, "sleep", lambda seconds: None)  # between its attempts
        hub.url = url
        yield hub


def weights_of(hub):
    return [name for repo in IDS for name in hub.fetched(repo) if name.endswith(".safetensors")]


def refused(code, *words, ids=IDS, **options):
    """The one line that a pair is refused with."""
    with pytest.raises(UserError) as error:
        open_pair(*ids, **options)
    line = f"{error.value} {error.value.hint}"
    assert error.value.code == code and "\n" not in line and all(word in line for word in words), line


def shard(folder):
    """A folder's weights as one file a tensor: {name: bytes} with an index, and no single file."""
    raw = (folder / SINGLE).read_bytes()
    size = int.from_bytes(raw[:8], "little")
    header, files, place = json.loads(raw[8 : 8 + size]), {SINGLE: None}, {}
    for i, (name, entry) in enumerate(header.items()):
        begin, end = entry["data_offsets"]
        text = json.dumps({name: entry | {"data_offsets": [0, end - begin]}}).encode()
        place[name] = f"part-{i}.safetensors"
        files[place[name]] = len(text).to_bytes(8, "little") + text + raw[8 + size + begin : 8 + size + end]
    return files | {INDEX: json.dumps({"weight_map": place}).encode()}


def generate(*flags, **environment):
    words = [sys.executable, "-m", "minidflash", "generate", "--tokens", "9 9 5", "-n", "8", "--ignore-eos"]
    done = subprocess.run(
        [*words, "--backend", "oracle", "-q", "--target", IDS[0], "--drafter", IDS[1], *flags],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return done.returncode, done.stdout, done.stderr


def test_the_command_line_runs_revisions_of_ids_and_again_without_the_network(hub, folders):
    """main is broken in both: only what --revision and --drafter-revision name can run."""
    for repo, folder, revision in zip(IDS, folders, ("v1", "v2"), strict=True):
        hub.add(repo, folder, revision)
        hub.add(repo, folder, **{"config.json": b"{}"})
    revisions = "--revision", "v1", "--drafter-revision", "v2"
    code, text, err = generate(*revisions)
    assert (code, err) == (0, "") and text.strip()
    assert sorted(weights_of(hub)) == [SINGLE, SINGLE]
    seen = len(hub.seen)
    assert generate(*revisions, "--offline") == generate(*revisions, HF_HUB_OFFLINE="1") == (0, text, "")
    assert len(hub.seen) == seen
    code, _, err = generate("--revision", "v3", "--drafter-revision", "v2")
    assert code == 2 and "some/target at revision v3: no such revision" in err and err.count("\n") == 1


@pytest.mark.parametrize("which, keys, words", [
    (1, {"hidden_size": 48, "head_dim": 16}, ["hidden_size is 48", "not a pair"]),
    (1, {"vocab_size": 5000}, ["vocab_size is 5000, the target's is 64", "not a pair"]),
    (1, {"num_target_layers": 9}, ["num_target_layers is 9"]),
    (1, {"num_target_layers": None, "dflash_config": {"mask_token_id": 1, "target_layer_ids": [99]}},
     ["target_layer_ids taps layer 99"]),
    (1, {"dflash_config": {"mask_token_id": 64, "target_layer_ids": [0]}},
     ["mask_token_id is 64", "ids 0 to 63"]),
    (0, {"num_hidden_layers": 10**6}, ["num_hidden_layers is 1000000", "at most 1024"]),
    (0, {"model_type": "mamba", "architectures": None}, ["architecture mamba is not supported"]),
])  # fmt: skip
def test_what_is_no_pair_is_refused_before_a_weight_is_fetched(hub, folders, which, keys, words):
    edit(folders[which] / "config.json", **keys)
    hub.add(IDS[which], folders[which])
    refused(2, *words)
    assert hub.fetched(IDS[which]) and not weights_of(hub)


def test_swapped_ids_say_so_and_fetch_no_weight(hub):
    refused(2, "give it as --drafter", ids=IDS[::-1])
    assert not weights_of(hub)


def test_info_of_ids_fetches_no_weight(hub, mdf):
    code, out, err = mdf("info", "--target", IDS[0], "--drafter", IDS[1], "--ctx", 64)
    assert (code, err) == (0, "") and out.count("no weights here") == 2 and not weights_of(hub)
    open_pair(*IDS)
    assert "no weights here" not in mdf("info", "--target", IDS[0], "--drafter", IDS[1], "--ctx", 64)[1]


def test_weights_are_of_the_commit_whose_config_was_read(hub, folders, monkeypatch):
    """The branch moves while the pair is checked."""
    check = pair_module.check_pair
    commits = [hub.commit(repo, "main") for repo in IDS]

    def moved(*configs):
        check(*configs)
        for repo, folder in zip(IDS, folders, strict=True):
            hub.add(repo, folder, "before")
            hub.add(repo, folder, **{"config.json": b"{}", SINGLE: b"other"})

    monkeypatch.setattr(pair_module, "check_pair", moved)
    pair = open_pair(*IDS)
    assert [one.files.revision for one in (pair.target, pair.drafter)] == commits
    assert pair.target.files.folder.name == commits[0]


def test_private_and_gated_repositories_need_what_their_refusal_names(hub, monkeypatch):
    hub.tokens[IDS[0]] = "secret"
    refused(2, IDS[0], "no such repository", "hf auth login", "HF_TOKEN")
    monkeypatch.setenv("HF_TOKEN", "wrong")
    refused(2, IDS[0], "no such repository")
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert open_pair(*IDS)
    hub.add("some/other", Path(ROOT / "weights" / "default"))
    hub.gated.add("some/other")
    refused(2, "some/other is gated", "accept its terms", "hf auth login", ids=(IDS[0], "some/other"))


def test_a_connection_that_breaks_goes_on_from_its_byte(hub, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)  # what it keeps of an answer
    size = len(hub.repos[IDS[0]]["main"][SINGLE])
    hub.cuts[SINGLE] = [size // 2]
    assert open_pair(*IDS)
    lines = [line for line in hub.seen if line.startswith(f"GET /{IDS[0]}") and SINGLE in line]
    assert len(lines) == 2 and 0 < int(lines[1].split("bytes=")[1].rstrip("-")) <= size // 2


def test_a_download_that_ends_early_goes_on_with_the_files_that_are_missing(hub, folders, mdf):
    files = shard(folders[0])
    hub.add(IDS[0], folders[0], **files)
    hub.cuts["part-3.safetensors"] = [0] * 99
    refused(3, IDS[0], "could not be fetched")
    assert len(hub.cuts.pop("part-3.safetensors")) > 50, "it gives up"
    refused(3, IDS[0], "only partly in the local cache", "--offline", offline=True)
    assert "no weights here" in mdf("info", "--target", IDS[0], "--offline", "--ctx", 64)[1]
    hub.seen.clear()
    pair = open_pair(*IDS)
    assert len(pair.target.files.files) == len(files) - 2
    assert hub.fetched(IDS[0]).count("part-3.safetensors") == 1
    assert "part-0.safetensors" not in hub.fetched(IDS[0])


OPEN = """
import sys
from minidflash.pair import open_pair
print(len(open_pair(*sys.argv[1:]).target.files.tensors))
"""


def test_two_processes_at_once_fetch_each_file_once(hub, folders):
    hub.gate.clear()
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    both = [
        subprocess.Popen([sys.executable, "-c", OPEN, *IDS], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    while sum("HEAD" in line and SINGLE in line for line in list(hub.seen)) < 2:
        assert all(one.poll() is None for one in both)
    hub.gate.set()
    told = [one.communicate(timeout=60)[0] for one in both]
    assert told[0] == told[1] and int(told[0]) > 10 and [one.returncode for one in both] == [0, 0]
    assert sorted(weights_of(hub)) == [SINGLE, SINGLE]


def test_a_hub_that_is_gone_leaves_what_was_fetched(hub, folders, monkeypatch):
    assert open_pair(*IDS)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert open_pair(*IDS)
    refused(3, "some/thing", "local cache", "check the network", ids=("some/thing", "none"))
