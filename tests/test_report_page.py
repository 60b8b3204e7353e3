"""The HTML report on records written by hand: its verdict, the search, gains, metrics and calibration."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Page
from scipy import stats
from test_html_report import assert_drawn, close, shown

from pfedme.algorithms import ALGORITHMS
from pfedme.cli import main
from pfedme.core.models import MLR
from pfedme.data.table import Table
from pfedme.report.html.question import noun
from pfedme.runs.run import Run

KINDS = {"fedavg": ("global", "local"), "pfedme": ("global", "local", "personal"), "pooled": ("global",)}
KINDS |= {"alone": ("personal",)}
NAMES = ["North Vale", "Harbour", "St Anne's", "Riverside", "Elm Park", "Old Mill", "Westgate", "Kingsway"]
METRICS = ("auc", "balanced_accuracy", "recall", "precision", "f1", "brier", "log_loss")
VERDICT = {
    "verdict": "cannot tell", "gain": 0.126, "low": -0.062, "high": 0.314, "metric": "accuracy",
    "joined": "fedavg's global model", "clients": 18, "seeds": 1, "gaining": 3, "losing": 1,
    "why": "the interval contains zero", "sentence": "",
}  # fmt: skip
SENTENCES = ["η = 0.21 from the curvature of the clients' losses.", "Stopped after 40 rounds."]


def model(value: float, **more: Any) -> dict[str, Any]:
    """A model's entry in a record."""
    clients = {"mean": value, "std": 0.1, "worst_decile": value - 0.2, "min": 0.0}
    others = {key: value - 0.01 * k for k, key in enumerate(METRICS, 1)}
    return {
        "accuracy": value,
        "loss": others["log_loss"],
        "train_loss": 0.4,
        **others,
        "clients": clients,
    } | more


def written(
    out: Path,
    method: str,
    seed: int = 0,
    scores: dict[str, np.ndarray] | None = None,
    names: list[str] = NAMES,
    more: dict[str, Any] | None = None,
    **record: Any,
) -> Path:
    """A finished run whose clients have these scores with each kind of model; `more` is for each model."""
    out.mkdir(parents=True)
    table = Table(path="/data/visits.csv", client="clinic_id", label="result")
    run = Run(algorithm=ALGORITHMS[method](), data=table, model=MLR(), rounds=40, seed=seed)
    every = scores or {kind: np.full(len(names), 0.8) for kind in KINDS[method]}
    rows = 10 + np.arange(len(names))
    final = {kind: model(float(np.average(own, weights=rows)), **(more or {})) for kind, own in every.items()}
    final |= {"round": 40, "baseline": model(0.6, label="negative")}
    told = {
        "status": "finished", "version": "0", "config": run.to_json(), "command": "", "environment": {},
        "timing": {"compile_s": 1.0, "train_s": 1.0, "eval_s": 1.0, "rounds": 40},
        "metric": {"key": "accuracy", "why": ""},
        "history": [{**final, "round": 0}, final], "final": final,
    } | record  # fmt: skip
    (out / "record.json").write_text(json.dumps(told))
    with (out / "clients.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["client", "n_train", "n_test", *(f"{kind}_accuracy" for kind in every)])
        for k, name in enumerate(names):
            writer.writerow([name, 3 * rows[k], rows[k], *(own[k] for own in every.values())])
    return out


def compared(out: Path, verdict: dict[str, Any] | None, *methods: str, **settings: Any) -> Path:
    """A comparison of runs with one seed, and its verdict."""
    jobs = []
    for method in methods:
        written(out / method, method, **settings)
        config = json.loads((out / method / "record.json").read_text())["config"]
        jobs.append({"label": method, "folder": method, "config": config})
    content = {"runs": jobs, **({"verdict": verdict} if verdict else {})}
    (out / "compare.json").write_text(json.dumps(content))
    return out


def page(folder: Path) -> Path:
    """The report on a folder."""
    assert main(["report", str(folder), "-o", str(folder / "page.html"), "--force"]) == 0
    return folder / "page.html"


# --- whether joining pays


@pytest.mark.parametrize(
    ("verdict", "text", "tone"),
    [
        (VERDICT, "Cannot tell: +12.6 points, 95 % interval −6.2 to +31.4, 18 clients.", "open"),
        (VERDICT | {"verdict": "yes", "low": 0.02, "why": ""}, "Yes: +12.6 points, 95 %", "good"),
        (VERDICT | {"verdict": "no", "gain": -0.04, "low": -0.07, "high": -0.01},
         "No: −4.0 points, 95 % interval −7.0 to −1.0, 18 clients.", "bad"),
        (VERDICT | {"level": 0.98}, "Cannot tell: +12.6 points, 98 % interval −6.2 to +31.4", "open"),
        (VERDICT | {"metric": "auc"}, "Cannot tell: +0.126 of AUC, 95 % interval −0.062 to +0.314", "open"),
        (VERDICT | {"verdict": "no", "metric": "rmse", "gain": -0.5, "low": -0.8, "high": -0.2},
         "No: RMSE higher by 0.5, 95 % interval +0.2 to +0.8, 18 clients.", "bad"),
        (VERDICT | {"metric": "log_loss"}, "Cannot tell: log loss lower by 0.126, 95 % interval", "open"),
        (VERDICT | {"gain": None, "low": None, "high": None, "clients": 1}, "Cannot tell: 1 client.", "open"),
    ],
)  # fmt: skip
def test_the_verdict_has_a_word_a_sign_a_colour_and_its_interval(
    tab: Page, tmp_path: Path, verdict: dict[str, Any], text: str, tone: str
):
    tab.open(page(compared(tmp_path / "c", verdict, "fedavg", "alone")))
    found = tab.evaluate("""(() => {
      const verdict = document.querySelector("#answer .verdict");
      const badge = verdict.querySelector(".badge");
      const [sign, word] = [badge.firstChild.textContent.trim(), badge.lastChild.textContent];
      const lead = word + verdict.querySelector(".lead").textContent.slice(badge.textContent.length);
      const colour = getComputedStyle(badge).backgroundColor;
      return { sign, lead, colour, tone: verdict.classList[1], all: verdict.textContent };
    })()""")
    assert found["lead"].replace("\u00a0", " ").startswith(text)
    assert found["tone"] == tone
    assert found["sign"] == {"open": "?", "good": "✓", "bad": "✗"}[tone]
    red, green, blue = (int(part) for part in found["colour"][4:-1].split(","))
    assert {"good": green > 1.5 * red, "bad": red > 1.5 * green, "open": abs(red - blue) < 32}[tone]
    if verdict["why"]:
        assert "The interval contains zero." in found["all"]
    assert "fedavg's global model against training alone" in found["all"]
    assert tab.errors == []


def test_records_without_a_verdict_claim_nothing(tmp_path: Path):
    """Means that are far apart are no verdict."""
    out = tmp_path / "c"
    compared(out, None, "fedavg", "alone")
    record = json.loads((out / "alone" / "record.json").read_text())
    record["final"]["personal"]["accuracy"] = 0.1
    (out / "alone" / "record.json").write_text(json.dumps(record))
    (headline,) = shown(out)["headline"]
    assert headline["verdicts"] == []
    assert headline["lead"].startswith("These runs cannot show whether joining pays")
    assert "pays, by" not in json.dumps(headline)


def test_what_was_still_improving_is_named_beside_the_verdict(tab: Page, tmp_path: Path):
    auto = {"improving": True, "sentences": SENTENCES}
    out = compared(tmp_path / "c", VERDICT, "fedavg", auto=auto)
    written(out / "pfedme", "pfedme", auto=auto | {"improving": False})
    tab.open(page(out))
    answer = tab.evaluate("document.querySelector('#answer').innerText")
    assert "fedavg was still improving when training ended" in answer
    trained = tab.evaluate("document.querySelector('#training').innerText")
    for text in (*SENTENCES, "still falling"):
        assert text in trained


def test_seeds_that_were_trained_alike_share_their_sentences(tmp_path: Path):
    for seed in range(3):
        text = [*SENTENCES, "Seed 2 was restarted."] if seed == 2 else SENTENCES
        written(tmp_path / f"{seed}", "fedavg", seed, auto={"improving": False, "sentences": text})
    (group,) = shown(*(tmp_path / f"{seed}" for seed in range(3)))["groups"]
    assert [(t["seeds"], len(t["sentences"])) for t in group["training"]] == [([0, 1], 2), ([2], 3)]


def test_a_comparison_tells_its_verdict_in_whatever_order_folders_are_given(tmp_path: Path):
    out = compared(tmp_path / "c", VERDICT, "fedavg", "alone")
    for folders in ([out], [out / "fedavg", out], [out, out / "alone"]):
        (headline,) = shown(*folders)["headline"]
        assert [v["verdict"] for v in headline["verdicts"]] == ["cannot tell"]


@pytest.mark.parametrize(
    "change", [{"verdict": "perhaps"}, {"gain": "large"}], ids=["no such verdict", "no number"]
)
def test_a_damaged_verdict_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str]
):
    out = compared(tmp_path / "c", VERDICT | change, "fedavg", "alone")
    assert main(["report", str(out), "-o", str(tmp_path / "page.html")]) == 2
    assert str(out / "compare.json") in capsys.readouterr().err


@pytest.mark.parametrize("width", [1440, 400])
def test_records_of_older_versions_are_drawn_with_what_they_have(tab: Page, tmp_path: Path, width: int):
    out = compared(tmp_path / "c", None, "fedavg", "alone")
    for place in out.glob("*/record.json"):
        record = json.loads(place.read_text())
        del record["metric"], record["final"]["baseline"]
        for entry in (*record["history"], record["final"]):
            for kind in {"global", "local", "personal"} & set(entry):
                old = ("accuracy", "loss", "train_loss", "clients")
                entry[kind] = {key: entry[kind][key] for key in old}
            entry.pop("baseline", None)
        place.write_text(json.dumps(record))
    plan = out / "compare.json"
    plan.write_text(json.dumps(json.loads(plan.read_text())["runs"]))
    assert_drawn(tab, page(out), {"curves", "gain", "sizes"}, width, dark=False)
    assert "cannot show whether joining pays" in tab.evaluate("document.querySelector('#answer').innerText")
    assert tab.evaluate("document.querySelector('#training, text.base, .best')") is None


# --- marks


def marks(
    tmp_path: Path, gains: np.ndarray, seeds: tuple[float, ...] = (0.0,), level: float = 0.7
) -> list[str]:
    """The methods whose global model is marked, of two whose clients differ by `gains` and a shift a seed."""
    folders = []
    for seed, shift in enumerate(seeds):
        names = [f"c{k}" for k in range(len(gains))]
        for method, own in (("fedavg", level + 0 * gains), ("pfedme", level + gains + shift)):
            folders.append(written(tmp_path / f"{method}-{seed}", method, seed, {"global": own}, names))
    return [group["label"] for group in shown(*folders)["groups"] if group["best"].get("global")]


def test_only_what_is_better_beyond_noise_is_marked(tmp_path: Path):
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.1, 30)
    noise -= noise.mean()
    half = stats.t.ppf(0.975, 29) * stats.sem(noise)
    assert marks(tmp_path / "sure", noise + 1.05 * half + 0.01) == ["pfedme"]
    assert marks(tmp_path / "noise", noise + 0.5 * half) == []
    assert marks(tmp_path / "below", noise - 1.05 * half - 0.01) == ["fedavg"]
    assert marks(tmp_path / "seeds", noise + 0.02, seeds=(0.0, 0.1, -0.1)) == []
    assert marks(tmp_path / "one", np.array([0.3])) == []


def test_what_is_below_the_baseline_is_not_marked(tmp_path: Path):
    gains = 0.05 + 0.001 * np.arange(30)
    assert marks(tmp_path / "below", gains, level=0.5) == []  # the majority class reaches 0.6
    assert marks(tmp_path / "above", gains, level=0.6) == ["pfedme"]


# --- one client


FIND = """(async (keys) => {
  const input = document.querySelector("#find-name");
  input.focus();
  for (const key of keys) {
    if (key.length > 1 && key[0] === "@") {
      input.dispatchEvent(new KeyboardEvent("keydown", { key: key.slice(1) }));
    } else {
      input.value = key;
      input.dispatchEvent(new Event("input"));
    }
  }
  const list = document.querySelector("#find-list");
  return {
    value: input.value,
    options: list.hidden ? [] : [...list.children].map((li) => li.textContent),
    active: document.getElementById(input.getAttribute("aria-activedescendant"))?.textContent ?? null,
    expanded: input.getAttribute("aria-expanded"),
    status: document.querySelector("#find-status").textContent,
    found: document.querySelector(".found").innerText,
  };
})"""


def look_up(tab: Page, *keys: str) -> dict[str, Any]:
    """What the search shows after texts were typed and keys (`@Enter`) were pressed."""
    return tab.evaluate(f"{FIND}({json.dumps(keys)})")


def test_a_client_is_found_by_its_name_with_the_keyboard(tab: Page, tmp_path: Path):
    out = tmp_path / "c"
    scores = {"global": np.linspace(0.5, 0.9, 8), "local": np.linspace(0.6, 0.95, 8)}
    written(out / "fedavg", "fedavg", scores=scores)
    written(out / "alone", "alone", scores={"personal": np.linspace(0.7, 0.8, 8)})
    assert main(["report", str(out / "fedavg"), str(out / "alone"), "-o", str(out / "page.html")]) == 0
    tab.open(out / "page.html", width=400)
    assert look_up(tab, "")["options"] == []
    typed = look_up(tab, "w")
    assert (typed["options"], typed["expanded"]) == (["Westgate", "Kingsway"], "true")  # it begins with w
    assert typed["status"] == "2 clients match."
    assert look_up(tab, "@ArrowDown", "@ArrowDown")["active"] == "Kingsway"
    assert look_up(tab, "@ArrowDown")["active"] == "Westgate"
    chosen = look_up(tab, "@ArrowUp", "@Enter")
    assert (chosen["value"], chosen["options"], chosen["expanded"]) == ("Kingsway", [], "false")
    gain = 100 * (scores["local"][7] - 0.8)
    for part in ("51 training rows, 17 test rows", f"+{gain:.1f} ±", "95.00 %", "90.00 %", "80.00 %"):
        assert part in chosen["found"]
    assert "undecided" in chosen["found"]
    assert "No client's name contains this" in look_up(tab, "nobody")["status"]
    assert look_up(tab, "@Escape", "@Escape")["value"] == ""
    assert tab.evaluate("document.querySelector('label[for=find-name]').textContent")
    assert tab.evaluate("document.documentElement.scrollWidth") <= 400
    assert tab.errors == []


def test_any_of_ten_thousand_clients_is_found(tab: Page, tmp_path: Path):
    names = [f"site {k}" for k in range(10_000)]
    values = np.random.default_rng(0).random(10_000).round(4)
    out = tmp_path / "c"
    for method, kind in (("fedavg", "local"), ("alone", "personal")):
        written(out / method, method, scores={kind: values}, names=names)
    found = shown(out / "fedavg", out / "alone")["find"][0]
    assert (len(set(found["client"])), found["of"]) == (10_000, 10_000)
    assert main(["report", str(out / "fedavg"), str(out / "alone"), "-o", str(out / "page.html")]) == 0
    assert (out / "page.html").stat().st_size < 2e6
    tab.open(out / "page.html")
    for k in (0, 4321, 9999):
        told = look_up(tab, f"SITE {k}", "@Enter")
        assert told["found"].startswith(f"site {k}\n")
        assert f"{100 * values[k]:.2f} %" in told["found"]
    assert "of which 8 are listed" in look_up(tab, "site 1")["status"]
    assert tab.errors == []


def test_a_client_finds_what_it_chose(tmp_path: Path):
    out = written(tmp_path / "run", "fedavg")
    head = "client,n_train,n_test,choice,lam,recommended_accuracy,alone_accuracy,gain_over_alone"
    lines = [f"{head},gain_over_alone_ci95,gain_over_global,gain_over_global_ci95"]
    lines += [f"{name},30,10,personal,3,0.9,0.8,0.1,0.05,0,0" for name in NAMES]
    (out / "personalized.csv").write_text("\n".join(lines) + "\n")
    (found,) = shown(out)["find"]
    (gain,) = found["gains"]
    assert gain["choice"] == ["λ = 3"] * 8
    assert (gain["gain"], gain["ci"], gain["mine"]) == ([0.1] * 8, [0.05] * 8, [0.9] * 8)


# --- charts and tables


@pytest.mark.parametrize("clients", [1, 40, 41])
def test_up_to_forty_clients_have_named_bars_sorted_by_their_gain(tab: Page, tmp_path: Path, clients: int):
    names = [f"clinic of town {k}" for k in range(clients)]
    values = np.random.default_rng(1).random(clients)
    written(tmp_path / "fedavg", "fedavg", scores={"local": values}, names=names)
    written(tmp_path / "alone", "alone", scores={"personal": np.full(clients, 0.5)}, names=names)
    out = tmp_path / "page.html"
    assert main(["report", *(str(tmp_path / m) for m in ("fedavg", "alone")), "-o", str(out)]) == 0
    tab.open(out)
    bars = tab.evaluate("""[...document.querySelectorAll("#gain .gain-bar")].map((bar) => ({
      name: bar.querySelector("text").textContent,
      text: bar.lastChild.textContent,
      whisker: bar.querySelector(".whisker").getBBox().width,
      block: bar.querySelector(".block").getBBox().width,
    }))""")
    if clients > 40:
        assert bars == []
        assert tab.evaluate("document.querySelectorAll('#gain .point').length") >= clients
        return
    order = np.argsort(-values)
    assert [bar["name"] for bar in bars] == [names[k] for k in order]
    gains = 100 * (values[order] - 0.5)
    assert [bar["text"].replace("−", "-") for bar in bars] == [f"{gain:+.1f}" for gain in gains]
    told = shown(tmp_path / "fedavg", tmp_path / "alone")["gains"][0]["clients"]
    halves = 100 * np.array(told["ci"])[::-1]
    for bar, gain, half in zip(bars, gains, halves, strict=True):
        # One scale for bars and intervals.
        assert bar["block"] * 2 * half == pytest.approx(bar["whisker"] * abs(gain), rel=0.05)


def test_the_baseline_is_in_every_chart_of_accuracy_and_in_the_tables(tab: Page, tmp_path: Path):
    out = compared(tmp_path / "c", VERDICT, "fedavg", "alone")
    tab.open(page(out))
    for chart in ("#curves figure:first-of-type", "#sizes figure"):
        text = tab.evaluate(f"document.querySelector('{chart} text.base').textContent")
        assert text == "majority class"
    rows = tab.evaluate(
        "[...document.querySelectorAll('#results > .scroll tbody tr')].map((row) => row.innerText)"
    )
    (base,) = (row for row in rows if "Majority class: negative" in row)
    assert "60.00" in base
    assert not tab.evaluate(
        "[...document.querySelectorAll('#curves figure')].at(-1).querySelector('text.base')"
    )


@pytest.mark.skipif("pooled" not in ALGORITHMS, reason="there is no pooled model yet")
def test_the_pooled_model_is_labelled_as_a_simulation_and_never_marked(tmp_path: Path):
    rng = np.random.default_rng(0)
    for method, level in (("pooled", 0.9), ("fedavg", 0.7), ("pfedme", 0.65)):
        written(tmp_path / method, method, scores={"global": level + 0.01 * rng.random(8)})
    groups = {g["label"]: g for g in shown(*(tmp_path / m for m in ("pooled", "fedavg", "pfedme")))["groups"]}
    assert groups["pooled"]["aside"] == "what one central table would give (simulation only)"
    assert groups["pooled"]["best"] == {}
    assert groups["fedavg"]["best"]["global"]


def test_the_chosen_metric_comes_first_and_all_can_be_unfolded(tab: Page, tmp_path: Path):
    why = "Only 4.5 % of the rows have 'yes'; models are judged by AUC."
    half = {"half_width": {"auc": 0.031}, "by_client": {"auc": {"worst_decile": 0.44}}}
    out = written(tmp_path / "run", "fedavg", more=half, metric={"key": "auc", "why": why, "positive": "yes"})
    (group,) = shown(out)["groups"]
    final = json.loads((out / "record.json").read_text())["final"]
    assert group["final"]["global"] == {
        "value": close(final["global"]["auc"]), "ci": 0.031, "worst": 0.44, "worst_ci": None,
    }  # fmt: skip
    tab.open(page(out))
    text = tab.evaluate("document.querySelector('#results').innerText")
    assert why in text.replace("\u00a0", " ")
    assert "AUC over all clients" in text
    box = "document.querySelector('details.metrics')"
    assert tab.evaluate(f"{box}.open") is False
    tab.evaluate(f"{box}.open = true")
    heads = tab.evaluate(f"[...{box}.querySelectorAll('thead th')].map((th) => th.textContent)")
    assert heads == [
        "", "AUC", "Accuracy %", "Log loss", "Balanced accuracy %", "Recall %", "Precision %", "F1",
        "Brier score",
    ]  # fmt: skip
    first = tab.evaluate(
        f"[...{box}.querySelectorAll('tbody tr:first-child td')].map((td) => td.textContent)"
    )
    assert first[0] == f"{final['global']['auc']:.4f} ± 0.0310"
    assert first[4] == f"{100 * final['global']['recall']:.2f}"
    assert "F1 are for yes." in tab.evaluate(f"{box}.innerText")


def test_seeds_have_their_bins_pooled_in_a_calibration_curve(tab: Page, tmp_path: Path):
    rng = np.random.default_rng(0)
    seeds = [
        [
            {"predicted": (k + rng.random()) / 5, "observed": rng.random(), "rows": int(rng.integers(1, 9))}
            for k in range(5)
        ]
        for _ in range(3)
    ]
    for seed, bins in enumerate(seeds):
        written(tmp_path / f"{seed}", "fedavg", seed, more={"calibration": bins})
    found = shown(*(tmp_path / f"{seed}" for seed in range(3)))
    for kind in ("global", "local"):
        for k, told in enumerate(found["groups"][0]["calibration"][kind]):
            weights = [bins[k]["rows"] for bins in seeds]
            for key in ("predicted", "observed"):
                assert told[key] == close(np.average([bins[k][key] for bins in seeds], weights=weights))
    path = written(tmp_path / "one", "fedavg", more={"calibration": [*seeds[0], {**seeds[0][0], "rows": 0}]})
    tab.open(page(path))
    lines = tab.evaluate("""[...document.querySelectorAll("#results svg.chart")].map((svg) => ({
      diagonal: svg.querySelectorAll(".diagonal").length,
      lines: [...svg.querySelectorAll("[data-line]")].map((l) => l.dataset.line),
      dots: svg.querySelectorAll(".dot").length,
    }))""")
    assert lines == [{"diagonal": 1, "lines": ["global", "local"], "dots": 2 * 5}]


def test_quantities_show_r2_their_errors_and_the_mean(tab: Page, tmp_path: Path):
    errors = {"r2": 0.81, "rmse": 1234.5, "mae": 0.5, "accuracy": None, **dict.fromkeys(METRICS)}
    out = written(tmp_path / "run", "fedavg", more=errors, metric={"key": "r2", "why": ""})
    record = json.loads((out / "record.json").read_text())
    record["final"]["baseline"] = model(0.0, **errors) | {"r2": 0.0, "rmse": 2000.0, "label": 23.456789}
    (out / "record.json").write_text(json.dumps(record))
    (out / "clients.csv").unlink()
    found = shown(out)
    assert found["baselines"][0]["name"] == "mean"
    tab.open(page(out))
    tab.evaluate("document.querySelector('details.metrics').open = true")
    text = tab.evaluate("document.querySelector('#results').innerText")
    for part in ("Mean: 23.46", "0.8100", "RMSE", "1,235", "2,000", "MAE"):
        assert part in text
    assert "Accuracy" not in text
    assert tab.evaluate("document.querySelector('#curves text.base').textContent") == "mean"
    assert tab.errors == []


# --- the page


def test_the_page_is_titled_by_its_question(tab: Page, tmp_path: Path):
    out = compared(tmp_path / "c", VERDICT, "fedavg", "alone")
    tab.open(page(out))
    for place in ("title", "h1"):
        assert (
            tab.evaluate(f"document.querySelector('{place}').textContent") == "Predicting result at 8 clinics"
        )


@pytest.mark.parametrize(
    ("column", "count", "told"),
    [("site", 1, "site"), ("hospital_name", 3, "hospitals"), ("ICU", 2, "ICUs"), ("py", 2, "clients"),
     ("school district", 2, "school districts"), ("carrier.code", 5, "carriers")],
)  # fmt: skip
def test_a_column_is_called_by_its_noun(column: str, count: int, told: str):
    assert noun(column, count) == told


@pytest.mark.parametrize(("width", "dark"), [(1440, False), (400, True), (320, False)])
def test_nothing_is_cut_off(tab: Page, tmp_path: Path, width: int, dark: bool):
    names = ["A clinic with a name that is very long and has Manyveryverylongunbreakablewords", *NAMES[1:]]
    bins = [{"predicted": 0.1 * k, "observed": 0.1 * k, "rows": 3} for k in range(10)]
    auto = {"improving": True, "sentences": SENTENCES}
    out = compared(
        tmp_path / "c", VERDICT, "fedavg", "pfedme", "alone",
        names=names, auto=auto, more={"calibration": bins},
    )  # fmt: skip
    file = page(out)
    assert_drawn(tab, file, {"results", "curves", "gain", "sizes"}, width, dark)
    folded = tab.evaluate("[...document.querySelectorAll('details')].map((box) => (box.open = true)).length")
    assert folded > 5
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    if width < 480:
        wide = tab.evaluate("""[...document.querySelectorAll(".stack")]
          .filter((box) => box.scrollWidth > box.clientWidth + 1)
          .map((box) => box.getAttribute("aria-label"))""")
        assert wide == []
    outside = tab.evaluate("""[...document.querySelectorAll("main *")].filter((node) => {
      const box = node.getBoundingClientRect();
      const own = !node.closest(".scroll:not(.stack), .sr, svg, thead, .tip");
      return own && box.width && (box.right > innerWidth + 1 || box.left < -1);
    }).map((node) => node.outerHTML.slice(0, 80))""")
    assert outside == []


def test_cost_and_environment_are_folded_and_a_link_opens_them(tab: Page, tmp_path: Path):
    tab.open(page(written(tmp_path / "run", "fedavg", environment={"python": "3.12"})))
    opened = "[...document.querySelectorAll('details.fold')].map((box) => [box.parentNode.id, box.open])"
    assert tab.evaluate(opened) == [["cost", False], ["environment", False]]
    tab.evaluate("""new Promise((done) => {
      addEventListener("hashchange", () => setTimeout(done));
      document.querySelector("nav a[href='#environment']").click();
    })""")
    assert tab.evaluate(opened) == [["cost", False], ["environment", True]]
