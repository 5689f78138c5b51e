"""The race: who takes part, what is compared with what, and a fair clock. No test asserts a time."""

import dataclasses
import gc
import importlib.util
import itertools
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import stiefelkit as sk
from stiefelkit import errors, registry
from stiefelkit.cli import main
from stiefelkit.functional import cayley, pack_skew
from stiefelkit.measuring.races import clock, contenders, course, peers
from stiefelkit.measuring.races.clock import FEWEST, WARM_UPS, Timing, race
from stiefelkit.measuring.races.contenders import OPERATIONS, Contender
from stiefelkit.measuring.races.frame_plans import ParametrizationRace
from stiefelkit.measuring.races.frame_problem import FrameProblem
from stiefelkit.measuring.races.parametrizations import heats
from stiefelkit.measuring.races.rows import FrameRow
from stiefelkit.metrics import orthogonality_error, rounding_limit
from stiefelkit.testing import seeds

KEYS = [
    *("operation", "contender", "n", "p", "batch", "dtype", "device"),
    *("seconds", "gemm_units", "ratio_to_best_peer", "error_over_limit"),
]
GEOTORCH = importlib.util.find_spec("geotorch") is not None
QUICK = ["--repeats", "2", "--seconds", "1e-3"]


def plan(**changes) -> ParametrizationRace:
    return ParametrizationRace(
        **{"seed": seeds.seed(), "sizes": ((4, 4),), "repeats": 2, "seconds": 1e-3, "peers": True, **changes}
    )


def contender(row: FrameRow) -> str:
    return row.contender.partition(" (")[0]


class Watch:
    """A clock that is told what each version takes, and writes down who ran."""

    def __init__(self, **seconds):
        self.seconds, self.samples = seconds, []
        self.versions = {name: (lambda name=name: self.ran.append(name)) for name in seconds}
        self.ran: list[str] = []

    def __call__(self, run, calls):
        before = len(self.ran)
        for _ in range(calls):
            run()
        name = self.ran[-1]
        assert len(self.ran) == before + calls
        self.samples.append(name)
        took = self.seconds[name]
        return calls * (took.pop(0) if isinstance(took, list) else took)

    @property
    def measured(self):
        """Samples after the warm-up."""
        return self.samples[WARM_UPS * len(self.seconds) :]


# The measuring core


def test_a_timing_is_the_median_of_the_samples_per_call():
    warm = [1.0] * WARM_UPS
    watch = Watch(a=[*warm, 5.0, 1.0, 90.0], b=[*warm, 2.0, 2.0, 4.0])
    found = race(watch.versions, watch, repeats=3, seconds=9)
    assert list(found) == ["a", "b"]
    assert [found[name].median for name in "ab"] == [5.0, 2.0]
    assert found["a"] == Timing((5.0, 1.0, 90.0))


def test_every_round_has_one_sample_of_each_version_and_the_order_changes():
    watch = Watch(a=0.01, b=0.02, c=0.03)
    race(watch.versions, watch, repeats=20, seconds=9)
    rounds = [tuple(watch.measured[i : i + 3]) for i in range(0, 60, 3)]
    assert all(set(each) == {"a", "b", "c"} for each in rounds)
    assert len(set(rounds)) > 2


def test_a_slow_version_gets_fewer_samples_spread_over_the_rounds():
    watch = Watch(slow=1.0, quick=0.01)
    found = race(watch.versions, watch, repeats=40, seconds=0.5)
    assert {name: len(timing.samples) for name, timing in found.items()} == {"slow": FEWEST, "quick": 40}
    places = [i for i, name in enumerate(watch.measured) if name == "slow"]
    assert max(later - earlier for earlier, later in itertools.pairwise(places)) <= 2 + 40 // FEWEST


def test_a_quick_version_is_called_many_times_for_one_sample():
    watch = Watch(quick=1e-5)
    found = race(watch.versions, watch, repeats=3)
    assert len(watch.ran) == WARM_UPS + 3 * 100
    assert found["quick"].median == pytest.approx(1e-5)


def test_no_more_repeats_than_asked_for_even_when_few():
    watch = Watch(slow=1.0)
    assert len(race(watch.versions, watch, repeats=1, seconds=0.1)["slow"].samples) == 1


def test_the_collector_is_off_while_the_clock_runs_and_back_after_it():
    states = []
    race({"a": lambda: states.append(gc.isenabled())}, repeats=2)
    assert states
    assert not any(states)
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        race({"a": lambda: 1 / 0})
    assert gc.isenabled()


def test_the_cpu_clock_counts_the_work_and_calls_as_often_as_told():
    calls = []
    assert clock.cpu_seconds(lambda: calls.append(1), 3) >= 0
    assert len(calls) == 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_race_on_a_gpu():
    for heat in heats(plan(device="cuda")):
        assert all(row.seconds > 0 for row in heat.rows)


def test_the_unit_of_a_tall_frame_is_its_product_with_a_square_one():
    for batch, shape in ((1, (5, 3)), (4, (4, 5, 3))):
        assert clock.product_of(5, 3, batch, torch.complex64, torch.device("cpu"))().shape == shape


# Who takes part


@pytest.fixture
def own_registry(monkeypatch):
    own = registry.Registry("parametrization", dict(registry.parametrizations._targets), "nobody.home")
    monkeypatch.setattr(registry, "parametrizations", own)
    return own


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_every_registered_member_races_or_is_left_out_with_its_reason(dtype):
    for heat in heats(plan(dtype=dtype, peers=False, operations=tuple(OPERATIONS))):
        raced = {contender(row) for row in heat.rows}
        left_out = {name.partition(" (")[0] for name in heat.left_out}
        assert raced | left_out == set(sk.available())
        for name in left_out:
            unsupported = sk.available()[name].supports((4, 4), getattr(torch, dtype)) is not None
            assert unsupported or (name, heat.operation) == ("stiefel", "step")
        assert all(row.ratio_to_best_peer is None for row in heat.rows)


def test_a_plugin_races_in_each_of_its_precisions_and_has_no_peer_of_its_own(own_registry):
    class Mine(sk.parametrizations.Cayley):
        precisions = ("exact", "fast")

    own_registry.register("mine", Mine)
    (heat,) = heats(plan(members=("mine",), operations=("forward_backward",)))
    assert {row.contender for row in heat.rows} == {"mine (exact)", "mine (fast)"}
    assert {row.ratio_to_best_peer for row in heat.rows} == {None}
    (heat,) = heats(plan(members=("mine",), precisions=("fast",), operations=("forward",)))
    assert [row.contender for row in heat.rows] == ["mine (fast)"]


def test_a_precision_that_no_member_of_the_race_has_is_refused(own_registry):
    class Mine(sk.parametrizations.Cayley):
        precisions = ("exact",)

    own_registry.register("mine", Mine)
    with pytest.raises(errors.OptionError, match="a member with precision fast"):
        plan(members=("mine",), precisions=("fast",))


def test_a_plugin_may_bring_a_peer(own_registry, monkeypatch):
    class Mine(sk.parametrizations.Cayley):
        pass

    own_registry.register("mine", Mine)
    table = registry.Registry("peer", dict(peers.peers._targets), "nobody.home")
    table.register("theirs", dataclasses.replace(peers.peers.get("torch_solve"), family="mine"))
    monkeypatch.setattr(peers, "peers", table)
    (heat,) = heats(plan(members=("mine",), precisions=("exact",), operations=("forward",)))
    assert [row.contender for row in heat.rows] == ["mine (exact)", "theirs"]
    assert heat.rows[0].ratio_to_best_peer is not None


def test_a_peer_that_is_no_contender_is_refused():
    with pytest.raises(errors.PluginError, match="'wrong' needs to be a Contender"):
        peers.missing_packages({"wrong": 3})  # type: ignore[dict-item]


def test_options_reach_the_members_that_have_them_and_stand_in_the_name():
    (heat,) = heats(plan(members=("householder", "cayley"), options={"reflections": 2}, operations=("forward",)))
    names = {row.contender for row in heat.rows}
    assert {"householder (exact, reflections=2)", "cayley (exact)", "torch_householder_product"} <= names
    assert "as many reflectors as columns" in heat.left_out["torch_orthogonal_householder"]


def test_a_peer_that_fails_is_left_out_and_a_member_that_fails_is_not_hidden(own_registry, monkeypatch):
    def broken(problem):
        raise RuntimeError("not implemented for 'Matrix'\nand a long trace")

    class Broken(sk.parametrizations.Cayley):
        def forward(self, skew, phase=None):
            raise RuntimeError("a bug")

    monkeypatch.setattr(peers, "peers", registry.Registry("peer", {"bad": Contender("cayley", broken)}, ""))
    (heat,) = heats(plan(members=("cayley",), operations=("forward",)))
    assert heat.left_out == {"bad": "not implemented for 'Matrix'"}
    own_registry.register("broken", Broken)
    with pytest.raises(RuntimeError, match="a bug"):
        list(heats(plan(members=("broken",))))


# What is compared with what


def test_the_ratio_is_the_best_peers_time_over_its_own_within_family_and_heat():
    for heat in heats(plan(sizes=((6, 6), (6, 2)), batch=2)):
        for row, family in zip(heat.rows, heat.families, strict=True):
            like = [
                other.seconds
                for other, its in zip(heat.rows, heat.families, strict=True)
                if its == family and other.contender in peers.peers.names()
            ]
            assert row.ratio_to_best_peer == (min(like) / row.seconds if like else None)
            assert row.gemm_units == row.seconds / heat.unit


def test_a_peer_whose_frame_is_not_finite_is_no_yardstick(monkeypatch):
    solve = peers.peers.get("torch_solve")

    def poisoned(problem):
        entry = solve.enter(problem)
        return dataclasses.replace(entry, weight=lambda: sum(entry.parameters) * float("nan"))

    monkeypatch.setattr(peers, "peers", registry.Registry("peer", {"x": Contender("cayley", poisoned)}, ""))
    (heat,) = heats(plan(members=("cayley",), precisions=("exact",), operations=("forward",)))
    assert [(row.contender, row.ratio_to_best_peer) for row in heat.rows] == [("cayley (exact)", None), ("x", None)]
    assert heat.rows[1].error_over_limit is None


def test_peers_stand_under_the_family_of_the_map_that_they_compute():
    families = {name: peer.family for name, peer in peers.peers.available().items()}
    for name, family in families.items():
        named = [known for known in ("cayley", "householder", "matrix_exp") if known in name]
        assert named in ([family], [])
    assert {name for name in families if families[name] == "givens"} == {"layer_loop"}
    assert {name for name in families if families[name] == "stiefel"} == {"geoopt_canonical", "geoopt_euclidean"}
    assert families["torch_solve"] == "cayley"
    assert Counter(families.values()) == {"cayley": 4, "householder": 3, "matrix_exp": 4, "givens": 1, "stiefel": 2}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("size", [(7, 7), (7, 3), (1, 1), (2, 1)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_peers_give_frames_and_gradients_of_what_they_train(dtype, size, batch):
    n, p = size
    problem = FrameProblem(n, p, batch, dtype, seed=seeds.seed())
    g = problem.gradient()
    for name, peer in peers.peers.available().items():
        if peer.package and not GEOTORCH:
            continue
        if dtype.is_complex and (peer.family in ("householder", "stiefel") or peer.package):
            with pytest.raises(errors.DtypeError, match="real dtype"):
                peer.enter(problem)
            continue
        entry = peer.enter(FrameProblem(n, p, batch, dtype, seed=seeds.seed()))
        w = entry.weight()
        assert w.shape == problem.shape, name
        assert w.dtype == dtype
        # torch's reflectors with a base are no frame in some draws of 2 x 1, which is what a race then shows.
        if name != "torch_orthogonal_householder_base":
            assert orthogonality_error(w).max() <= 100 * rounding_limit(p, dtype), name
        kept = g.clone()
        for operation in peer.operations:
            OPERATIONS[operation](entry, g)()
        assert torch.equal(g, kept)
        assert entry.weight().isfinite().all(), name


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
@pytest.mark.parametrize("size", [(6, 6), (6, 2)])
def test_our_cayley_and_the_peers_map_the_same_skew_matrix(dtype, size):
    n, p = size
    x = FrameProblem(n, p, seed=seeds.seed(), dtype=dtype).tangent()
    a = x - torch.cat([x[:p].mH, x.new_zeros(n - p, p)])
    phase = torch.zeros(p, dtype=torch.float64) if dtype.is_complex else None
    ours = cayley(pack_skew(a[:p], a[p:]), n, p, phase=phase)
    found = {
        name: peers.peers.get(name).enter(FrameProblem(n, p, seed=seeds.seed(), dtype=dtype)).weight()
        for name in ("torch_solve", "torch_orthogonal_cayley")
    }
    assert torch.allclose(found["torch_solve"], ours, atol=1e-12)
    # torch maps by the inverse transform, which is that of -A: the same size of problem
    inverse = cayley(pack_skew(-a[:p], -a[p:]), n, p, phase=phase)
    assert torch.allclose(found["torch_orthogonal_cayley"], inverse, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_skew_matrix_has_norm_two_and_members_get_the_same(dtype):
    n = 200
    problem, twin = (FrameProblem(n, n, seed=seeds.seed(), dtype=dtype) for _ in range(2))
    x = twin.tangent()
    peer = torch.linalg.matrix_norm(x - x.mH, 2)
    layer = contenders.members(["cayley"], ["exact"], {})["cayley (exact)"].enter(problem)
    a, _ = sk.functional.unpack_skew(layer.parameters[0].detach(), n, n, dtype.is_complex)
    assert 1.8 < peer < 2.2
    assert 1.8 < torch.linalg.matrix_norm(a, 2) < 2.2


def test_both_householder_peers_multiply_the_same_reflectors():
    names = ("torch_householder_product", "torch_orthogonal_householder")
    problems = [FrameProblem(6, 4, seed=seeds.seed(), dtype=torch.float64) for _ in names]
    one, other = (peers.peers.get(name).enter(p).weight() for name, p in zip(names, problems, strict=True))
    assert torch.allclose(one, other, atol=1e-12)


def test_the_product_of_fewer_reflectors_is_theirs():
    entry = peers.peers.get("torch_householder_product").enter(
        FrameProblem(6, 4, seed=seeds.seed(), dtype=torch.float64, options={"reflections": 2})
    )
    below = entry.parameters[0].detach().tril(-1)
    assert below.shape == (6, 2)
    eye = torch.eye(6, dtype=torch.float64)
    first, second = (eye - 2 * torch.outer(u, u) / (u @ u) for u in (eye[:, :2] + below).mT)
    assert torch.allclose(entry.weight(), (first @ second)[:, :4], atol=1e-12)


def test_the_layer_loop_is_the_product_of_its_rotations():
    loop = peers.peers.get("layer_loop").enter(FrameProblem(3, 3, seed=seeds.seed(), dtype=torch.float64))
    (theta,) = loop.parameters

    def rotation(i, t):
        r = torch.eye(3, dtype=torch.float64)
        r[i, i] = r[i + 1, i + 1] = t.cos()
        r[i + 1, i] = t.sin()
        r[i, i + 1] = -t.sin()
        return r

    first, second, third = theta.detach()
    expected = rotation(0, third) @ rotation(1, second) @ rotation(0, first)
    assert torch.allclose(loop.weight(), expected, atol=1e-14)


def test_the_layer_loop_leaves_other_meshes_and_too_much_memory_alone():
    loop = peers.peers.get("layer_loop")
    with pytest.raises(errors.OptionError, match="brickwall"):
        loop.enter(FrameProblem(4, 4, options={"layout": "fft"}))
    with pytest.raises(errors.OptionError, match="2 GiB"):
        loop.enter(FrameProblem(4096, 4096))
    assert loop.enter(FrameProblem(4, 4, options={"layers": 2})).parameters[0].shape == (3,)


def test_a_race_uses_the_threads_asked_for_and_gives_them_back():
    before, seen = torch.get_num_threads(), []
    list(heats(plan(threads=2), lambda *_: seen.append(torch.get_num_threads())))
    assert set(seen) == {2}
    assert torch.get_num_threads() == before


def test_a_race_leaves_the_random_numbers_of_its_caller_alone():
    seeds.reseed(3)
    expected = torch.rand(1)
    seeds.reseed(3)
    list(heats(plan(operations=("forward",))))
    assert torch.equal(torch.rand(1), expected)


# The command


@pytest.fixture
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


pytestmark = pytest.mark.usefixtures("_in_a_folder_of_its_own")


def bench(words: str, *more: str) -> int:
    return main(["bench", "parametrizations", *words.split(), *more])


def test_the_command_prints_tables_and_writes_rows(capsys):
    assert bench("--sizes 4,5x2 --peers --operations step,forward --json rows.json", *QUICK) == 0
    rows = json.loads(Path("rows.json").read_text())
    assert all(list(row) == KEYS for row in rows)
    assert [field.name for field in dataclasses.fields(FrameRow)] == KEYS
    heats_in_order = list(dict.fromkeys((row["operation"], row["n"], row["p"]) for row in rows))
    assert heats_in_order == [("forward", 4, 4), ("step", 4, 4), ("forward", 5, 2), ("step", 5, 2)]
    assert {(row["batch"], row["dtype"], row["device"]) for row in rows} == {(1, "float32", "cpu")}
    shown = capsys.readouterr().out
    for row in rows:
        assert row["contender"] in shown
        assert row["seconds"] > 0
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert shown.count("Left out: fourier") == 1


def test_the_command_takes_batches_dtypes_and_options(capsys):
    words = (
        "--sizes 4 --batch 3 --dtype complex64 --members fourier,householder --precisions exact --operations forward"
    )
    assert bench(f"{words} --options.reflections 2", *QUICK) == 0
    shown = capsys.readouterr().out
    assert "forward, 3 of 4 x 4, complex64, cpu" in shown
    assert "householder (exact, reflections=2)" in shown
    assert "fourier (exact)" in shown


def test_help_says_what_is_drawn(capsys):
    assert bench("--help") == 0
    shown = " ".join(capsys.readouterr().out.split())
    for words in ("E |a|^2 = 1/n", "N(0, 1)", "uniform on (-pi, pi)", "dL/dW", "n x p with a p x p"):
        assert words in shown


def test_the_page_describes_every_peer():
    page = Path(__file__).parent.parent.joinpath("docs", "benchmarks.md").read_text()
    assert all(f"`{name.removesuffix('_base')}`" in page for name in peers.peers.names())


def test_options_may_stand_in_a_file(capsys):
    Path("my.toml").write_text(
        'sizes = "3"\nmembers = "householder"\noperations = "forward"\n[options]\nreflections = 2'
    )
    assert bench("--config my.toml", *QUICK) == 0
    assert "householder (exact, reflections=2)" in capsys.readouterr().out


def test_without_geotorch_the_rest_races_and_a_word_says_so(capsys, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "geotorch" else find(name))
    assert bench("--sizes 3 --peers --operations forward", *QUICK) == 0
    out, err = capsys.readouterr()
    assert 'pip install "stiefelkit[peers]"' in err
    assert len(err.splitlines()) == 1
    assert "geotorch" not in out
    assert "torch_orthogonal_cayley" in out
    assert bench("--sizes 3 --operations forward", *QUICK) == 0
    assert not capsys.readouterr().err


@pytest.mark.skipif(not GEOTORCH, reason="needs geotorch")
def test_geotorch_races_where_it_is_installed(capsys):
    assert bench("--sizes 4,4x2 --peers --operations forward_backward", *QUICK) == 0
    assert capsys.readouterr().out.count("geotorch_") == 4


def test_ctrl_c_keeps_what_is_done(capsys, monkeypatch):
    count = iter(range(9))

    def interrupted(*arguments, **options):
        if next(count) == 1:
            raise KeyboardInterrupt
        return race(*arguments, **options)

    monkeypatch.setattr(course, "race", interrupted)
    assert bench("--sizes 3 --json rows.json", *QUICK) == 130
    out, err = capsys.readouterr()
    assert "forward_backward, 3 x 3" in out
    assert len(err.splitlines()) == 1
    assert {row["operation"] for row in json.loads(Path("rows.json").read_text())} == {"forward_backward"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--members cayly", 'did you mean "cayley"'),
        ("--sizes 0", "n >= p >= 1"),
        ("--sizes -3", "n >= p >= 1"),
        ("--sizes 4x8", "got 4 x 8"),
        ("--sizes 4x", "4x"),
        ("--sizes 4x2x1", "4x2x1"),
        ("--sizes big", "big"),
        ("--sizes ,", "one size"),
        ("--dtype int32", "int32"),
        ("--dtype float23", 'did you mean "float32"'),
        ("--device gpu", "device"),
        ("--device cuda:99", "99"),
        ("--repeats -1", "repeats"),
        ("--repeats 2.5", "2.5"),
        ("--seconds 0", "seconds"),
        ("--seconds nan", "seconds"),
        ("--batch 0", "batch"),
        ("--threads 0", "threads"),
        ("--seed -1", "seed"),
        ("--precisions exakt", 'did you mean "exact"'),
        ("--operations forwards", 'did you mean "forward"'),
        ("--operations ,", "one operation"),
        ("--options.reflection 2", 'did you mean "reflections"'),
        ("--options.reflections 2 --members cayley", "reflections"),
        ("--json nowhere/rows.json", "nowhere"),
        ("--json .", "file"),
    ],
)
def test_an_error_of_the_user_is_one_sentence(words, says, capsys):
    assert bench(f"{words} --sizes 3" if "--sizes" not in words else words) == 2
    out, err = capsys.readouterr()
    assert not out
    assert err.startswith("Error: ")
    assert len(err.splitlines()) == 1
    assert says in err
    assert not list(Path().iterdir())


def test_a_race_of_nobody_is_an_error_that_tells_who_was_left_out(capsys):
    assert bench("--sizes 3 --members fourier --json rows.json", *QUICK) == 2
    out, err = capsys.readouterr()
    assert "fourier (exact): it needs a complex weight" in out
    assert err.startswith("Error: The race needs a contender")
    assert not Path("rows.json").exists()


@pytest.mark.parametrize(("words", "says"), [("bench --sizes 4", "race"), ("bench params", "parametrizations")])
def test_a_race_has_a_name(words, says, capsys):
    assert main(words.split()) == 2
    assert says in capsys.readouterr().err
