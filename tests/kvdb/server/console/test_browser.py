"""The console in a real browser, which `make console-test` finds; skipped without one."""

import os
from pathlib import Path
from time import time

import grpc
import numpy as np
import pytest
from prometheus_client import CollectorRegistry

import kvdb
import kvdb.server.console.api as api
from kvdb.server.metrics.calls import METHODS, CallMetrics
from kvdb.types import ContextUpdate, Retention
from query_optimizer.query_options import QueryOptions
from tests.kvdb.server.console.browser import Browser, found
from tests.kvdb.server.console.conftest import AWAY, BASE, HOSTILE, SPEC, TOKEN, store

pytestmark = pytest.mark.skipif(found() is None, reason="KVDB_CHROMIUM names no Chromium; make console-test finds one")

SIZES = {"desktop": (1280, 800), "phone": (390, 844), "narrow": (360, 740)}
NO_PICTURE = "the page is wider than its window"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    opened = Browser(found(), tmp_path_factory.mktemp("chromium"))
    yield opened
    opened.close()


@pytest.fixture
def keep(request):
    """`keep(page, name)` keeps a screenshot where KVDB_SCREENSHOTS names a folder."""

    def kept(page, name):
        if folder := os.environ.get("KVDB_SCREENSHOTS"):
            Path(folder).mkdir(parents=True, exist_ok=True)
            page.screenshot(Path(folder) / f"{name}.png")

    return kept


def home(page):
    page.until(
        "document.querySelectorAll('#contexts tbody tr').length > 0 && document.querySelector('#sessions tbody tr') !== null"
    )


def context_page(url, name):
    return f"{url}/ui/#/context/{name.replace('/', '%2F')}"


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("size", SIZES)
def test_the_pages_fit_their_window(browser, url, keep, size, dark):
    width, height = SIZES[size]
    theme = "dark" if dark else "light"
    with browser.page(f"{url}/ui/", width, height, dark=dark) as page:
        home(page)
        assert page.value("document.documentElement.scrollWidth <= innerWidth"), NO_PICTURE
        bright = page.value("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).reduce((a, b) => a + +b, 0)")
        assert (bright < 200) == dark
        keep(page, f"home-{size}-{theme}")
    with browser.page(context_page(url, BASE), width, height, dark=dark) as page:
        page.until("document.querySelector('canvas.heat') !== null")
        page.click("button[value=analyze]")
        page.until("document.querySelector('.outcome') !== null")
        assert page.value("document.documentElement.scrollWidth <= innerWidth"), NO_PICTURE
        keep(page, f"context-{size}-{theme}")


CUT = """[...document.querySelectorAll('th, td, dt, dd, p, h1, h2, button, label, pre, .tier, .node')].filter(
    (e) => e.checkVisibility() && (e.scrollWidth > e.clientWidth + 1 && e.clientWidth > 1
        || e.getBoundingClientRect().right > innerWidth + 1))
    .map((e) => `${e.tagName}: ${e.innerText}`)"""
"""What is wider than its room, or than the window."""


def test_nothing_is_cut_at_400_pixels(browser, open_console, engine):
    name = "a-name-of-a-context-without-any-space-that-goes-on-and-on/2024-12-31T23:59:59.999999"
    tokens = np.arange(320, dtype=np.int32)
    store(engine, name, tokens, np.random.default_rng(1), Retention(metadata={"source": "https://intranet.example/" + "a" * 60}))
    engine.build_index(name, "flat")
    session = engine.create_session(SPEC, tokens, label="request-9f8e7d6c-5b4a-3210-ffff-0123456789ab")
    session.tenant = "a-tenant-with-a-name-of-64-letters-" + "x" * 29
    url = open_console(engine, measured=counted())
    q, k = np.ones((SPEC.q_heads, 1, SPEC.head_dim), np.float32), np.ones((SPEC.kv_heads, 1, SPEC.head_dim), np.float32)
    session.attend(0, q, k, k)
    for opened in (f"{url}/ui/", context_page(url, name), f"{url}/ui/#/session/{session.name}"):
        with browser.page(opened, 400, 800) as page:
            if opened.endswith("/ui/"):
                home(page)
                page.until("document.querySelectorAll('#calls dd').length > 2")
            else:
                page.until("document.querySelector('#layer option') !== null")
                page.click("button[value=analyze]")
                page.until("document.querySelector('.outcome') !== null")
                page.value("document.querySelectorAll('details').forEach((one) => (one.open = true))")
            assert page.value("document.documentElement.scrollWidth <= innerWidth"), NO_PICTURE
            assert page.value(CUT) == []
    session.close()


def counted():
    """Calls that were measured: two steps, one other call, and failures of two kinds."""
    measured, paths = CallMetrics(CollectorRegistry()), {name: path for path, name in METHODS.items()}
    for seconds in (2e-4, 2e-3):
        measured.stepped("attend", seconds)
    measured.ended(paths["GetContext"], grpc.StatusCode.OK, 0.02)
    measured.ended(paths["GetContext"], grpc.StatusCode.NOT_FOUND, 0.02)
    measured.failed(grpc.StatusCode.RESOURCE_EXHAUSTED)
    return measured


def test_calls_latencies_and_errors_are_panels(browser, open_console, engine):
    measured = counted()
    with browser.page(f"{open_console(engine, measured=measured)}/ui/") as page:
        page.until("document.querySelector('#calls .latency td.number') !== null")
        errors, steps = "#calls .tier:last-child", "#calls .latency tbody tr"
        assert page.text("#calls-since") == "since the server started"
        assert page.text(steps).split("\n") == ["Decode steps", "≤ 250 µs", "≤ 2.5 ms"]
        assert page.text(f"{errors} .figure") == "2"
        assert {"NOT_FOUND", "RESOURCE_EXHAUSTED"} <= set(page.text(errors).split())
        measured.failed(grpc.StatusCode.UNAVAILABLE)
        for _ in range(100):
            measured.stepped("attend", 0.3)
        page.until("document.querySelector('#calls-since').innerText.startsWith('in the last')")
        assert page.text(errors).split() == ["Errors", "1", "UNAVAILABLE", "1"]
        assert page.text(steps).split("\n") == ["Decode steps", "≤ 500 ms", "≤ 500 ms"]
        assert 0 < float(page.text("#calls .tier .figure").removesuffix("/s")) <= 100


def order(page, table):
    return page.value(f"[...document.querySelectorAll('#{table} tbody th')].map((th) => th.querySelector('a').textContent)")


def sort_by(page, table, title):
    button = f"[...document.querySelectorAll('#{table} thead button')].find((one) => one.textContent === '{title}')"
    page.value(f"({button}.focus(), {button}.click())")
    return page.value(f"{button}.closest('th').ariaSort")


def test_tables_sort_as_numbers_and_stay_sorted(browser, open_console, engine):
    sizes = {"c-1": 100, "c-2": 1600, "c-10": 9, "d": 100, "e": 1000}
    for start, (name, tokens) in enumerate(sizes.items()):
        store(engine, name, np.arange(start, start + tokens, dtype=np.int32), np.random.default_rng(start))
    with browser.page(f"{open_console(engine)}/ui/") as page:
        page.until("document.querySelectorAll('#contexts tbody tr').length === 5")
        came = order(page, "contexts")
        assert sort_by(page, "contexts", "Name") == "ascending"
        assert order(page, "contexts") == ["c-1", "c-2", "c-10", "d", "e"]
        assert sort_by(page, "contexts", "Bytes") == "ascending"  # 9 blocks are more than 100 KiB, and 1 MiB more than both
        up = sorted(came, key=lambda name: engine.get(name).nbytes)  # which is stable
        assert order(page, "contexts") == up
        assert sort_by(page, "contexts", "Bytes") == "descending"
        down = sorted(came, key=lambda name: -engine.get(name).nbytes)
        assert order(page, "contexts") == down
        engine.update("e", ContextUpdate(pinned=True))
        page.until("document.querySelector('#contexts').innerText.includes('pinned')")
        assert order(page, "contexts") == down
        assert page.value("document.activeElement.textContent") == "Bytes"
        page.send("Page.reload")
        page.until("document.querySelectorAll('#contexts tbody tr').length === 5")
        assert order(page, "contexts") == down
        assert sort_by(page, "contexts", "Bytes") == "none"
        assert order(page, "contexts") == came
        assert sort_by(page, "contexts", "Last used") == "ascending"
        assert order(page, "contexts")[0] == max(came, key=lambda name: engine.get(name).used)


def test_sessions_have_an_id_a_tenant_and_an_age_and_the_same_label_leads_to_each(browser, open_console, engine):
    tokens = np.arange(8, dtype=np.int32)
    sessions = [engine.create_session(SPEC, tokens, label=label) for label in ("chat", "chat", "")]
    for session, tenant, opened in zip(sessions, ("acme", "globex", ""), (90, 4000, 70), strict=True):
        session.tenant, session.opened = tenant, time() - opened
    with browser.page(f"{open_console(engine)}/ui/") as page:
        page.until("document.querySelectorAll('#sessions tbody tr').length === 3")
        rows = page.value("[...document.querySelectorAll('#sessions tbody tr')].map((row) => row.innerText)")
        for session, row, age in zip(sessions[::-1], rows, ("1 min", "1 h", "1 min"), strict=True):
            assert session.name in row
            assert session.tenant in row
            assert age in row.split("\t")
            assert session.id not in page.value("document.documentElement.outerHTML")
        sort_by(page, "sessions", "Age")
        ages = page.value("[...document.querySelectorAll('#sessions tbody th a')].map((a) => a.hash)")
        assert ages == [f"#/session/{sessions[at].name}" for at in (2, 0, 1)]
        page.click("#sessions tbody tr:last-child a")
        page.until("document.querySelector('#facts')?.innerText.includes('globex')")
        assert sessions[1].name in page.text("#facts")
    for session in sessions:
        session.close()


def test_a_tile_of_nothing_is_not_a_part_of_anything(browser, open_console, engine):
    store(engine, "gone", np.arange(40, dtype=np.int32), np.random.default_rng(1))
    with browser.page(f"{open_console(engine)}/ui/") as page:
        page.until("document.querySelector('.tier .figure') !== null")
        (cpu,) = [tier for tier in engine.tiers() if tier.name == "cpu"]
        assert page.text(".tier").split() == ["Main", "memory", f"{cpu.blocks_used * cpu.block_nbytes / 1024:.1f}", "KiB"]
        engine.drop("gone")
        page.until("document.querySelector('#tiers').innerText.includes('Nothing is stored')")
        assert " of " not in page.text("#tiers")


def test_a_page_asks_nobody_but_its_server_and_shows_what_it_says(browser, url, database):
    with browser.page(f"{url}/ui/") as page:
        home(page)
        names = page.value("[...document.querySelectorAll('#contexts tbody a')].map((a) => a.textContent)")
        assert names == [info.name for info in database.contexts()]
        assert page.text("#contexts-count") == "4"
        assert "chat" in page.text("#sessions")
        colours = page.value(
            "[...document.querySelectorAll('#contexts .bar i:first-child')].map((i) => i.style.getPropertyValue('--hue'))"
        )
        by_name = dict(zip(names, colours, strict=True))
        assert by_name[BASE] == by_name["handbook/notes"] != by_name[HOSTILE]
        assert all(asked.startswith(url) for asked in page.requests)
        assert len(page.requests) >= 8


def test_a_hostile_name_is_text(browser, url):
    with browser.page(f"{url}/ui/") as page:
        home(page)
        page.value(f"[...document.querySelectorAll('#contexts a')].find((a) => a.textContent === {HOSTILE!r}).click()")
        page.until(f"document.querySelector('#context h1')?.textContent === {HOSTILE!r}")
        page.until("document.querySelector('#heat .empty') !== null")
        assert page.value("document.querySelectorAll('main img').length") == 0
        assert page.value("document.title").startswith(HOSTILE)


def test_a_map_and_a_plan_go_by_the_keyboard(browser, url):
    with browser.page(context_page(url, BASE)) as page:
        page.until("document.querySelector('canvas.heat') !== null")
        summary = page.text(".readout")
        assert f"{SPEC.layers} layers, {SPEC.q_heads} query heads" in summary
        page.value("document.querySelector('canvas.heat').focus()")
        for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
            page.press(key)
        assert page.text(".readout").startswith("layer 1, head 1: ")
        page.press("Enter")
        page.until("document.querySelector('.tree b')?.textContent === 'Merge on layer 1'")
        assert page.value("document.querySelector('#layer').value") == "1"
        assert "expected" in page.text(".costs")


def test_a_plan_that_searches_shows_each_way_below_its_part(browser, url, database, keep, monkeypatch):
    monkeypatch.setattr(api, "NO_OPTIONS", QueryOptions(retrieval=kvdb.Dipr(0.2)))
    with browser.page(context_page(url, BASE)) as page:
        page.until("document.querySelectorAll('#layer option').length === 2")
        page.value("document.querySelector('#layer').value = '1'")
        page.click("button[value=analyze]")
        page.until("document.querySelector('.outcome') !== null")
        assert "Search of flat" in page.text(".tree")
        assert "window" in page.text(".tree")
        assert "needs dipr(0.2)" in page.text(".tree")
        plan = api.explain(database, BASE, 1, analyze=True)
        gave_up = any(access["actual"]["left_heads"] for access in plan["accesses"])
        assert ("gave up on" in page.text(".tree")) == gave_up
        page.click(".tree summary")
        page.click("#plan > details > summary")
        assert page.text("#plan pre").startswith("Merge on layer 1")
        keep(page, "search-desktop-light")


def test_a_session_with_a_label_explains_its_next_query(browser, url):
    with browser.page(f"{url}/ui/") as page:
        home(page)
        page.click("#sessions tbody a")
        page.until("document.querySelector('#context h1')?.textContent === 'chat'")
        page.until("document.querySelectorAll('#layer option').length === 2")
        assert "first_layers" in page.text("#facts")
        page.click("button[value=analyze]")
        page.until("document.querySelector('.outcome') !== null")
        assert "Merge on layer 0" in page.text(".tree")


def test_an_answer_that_comes_late_is_not_shown_as_another_contexts(browser, url):
    slow = """(() => {
        const real = window.fetch
        window.fetch = async (asked, ...more) => {
            if (asked.endsWith("context?name=handbook")) await new Promise((go) => (window.go = go))
            return real(asked, ...more)
        }
    })()"""
    with browser.page(f"{url}/ui/") as page:
        home(page)
        page.value(slow)
        page.value(f"location.hash = '#/context/{BASE}'")
        page.until("window.go !== undefined")
        page.value(f"location.hash = '#/context/{AWAY}'")
        page.until("document.querySelector('#facts').innerText.includes('on disk')")
        page.value("new Promise((done) => (window.go(), setTimeout(done, 200)))")
        assert page.text("#context h1") == AWAY
        assert "on disk" in page.text("#facts")
        assert "legal" not in page.text("#facts")


def test_everything_to_press_has_a_name_and_can_be_reached(browser, url):
    with browser.page(context_page(url, BASE)) as page:
        page.until("document.querySelector('canvas.heat') !== null")
        tree = page.send("Accessibility.getFullAXTree")["nodes"]
        pressed = {"button", "link", "combobox", "textbox", "searchbox", "meter", "image", "DisclosureTriangle"}
        roles = [(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node.get("ignored")]
        assert {role for role, _ in roles} >= {"button", "link", "combobox", "image"}
        assert not [role for role, name in roles if role in pressed and not name.strip()]
        reached = set()
        for _ in range(22):
            page.press("Tab")
            reached.add(
                page.value("document.activeElement.id || document.activeElement.className || document.activeElement.textContent")
            )
        assert reached >= {"skip", "pause", "back", "measure", "heat", "layer"}


def test_it_shows_what_changes_and_stands_still_when_paused(browser, url, database):
    new = np.arange(3000, 3040, dtype=np.int32)
    with browser.page(f"{url}/ui/") as page:
        home(page)
        page.value("document.querySelector('#contexts a').focus()")
        focused = page.value("document.activeElement.dataset.focus")
        store(database, "zebra", new, np.random.default_rng(1))
        try:
            page.until("document.querySelector('#contexts').innerText.includes('zebra')")
            assert page.value("document.activeElement.dataset.focus") == focused
            page.value("document.activeElement.blur()")
            page.press("p")
            assert page.text("#state-text") == "paused"
            asked = len(page.requests)
        finally:
            database.drop("zebra")
        assert page.value("new Promise((done) => setTimeout(() => done(true), 100))")
        assert len(page.requests) == asked
        page.press("p")
        page.until("!document.querySelector('#contexts').innerText.includes('zebra')")
        assert page.text("#state-text") == "live"


def test_with_a_token_the_page_asks_for_it_and_keeps_it_in_its_tab(browser, locked_url):
    with browser.page(f"{locked_url}/ui/") as page:
        page.until("!document.querySelector('#login').hidden")
        assert not page.value("document.querySelector('#main').checkVisibility()")
        page.type("wrong")
        page.press("Enter")
        page.until("document.querySelector('#problem').innerText.includes('does not know')")
        assert page.value("document.activeElement.id") == "token"
        page.type(TOKEN)
        page.press("Enter")
        home(page)
        assert page.value("[sessionStorage.length, localStorage.length, document.cookie]") == [1, 0, ""]
        assert not [asked for asked in page.requests if TOKEN in asked]
        page.send("Page.reload")
        home(page)
        assert all("401" in error for error in page.errors)
        page.errors.clear()


def test_what_is_empty_or_wrong_is_said_in_words(browser, open_console, engine, url):
    with browser.page(f"{open_console(engine)}/ui/") as page:
        page.until("document.querySelectorAll('.empty').length === 3")
        for said in ("Nothing is stored yet", "No session is open", "No context is stored yet"):
            assert said in page.text("main")
    with browser.page(context_page(url, "nobody")) as page:
        page.until("document.querySelector('#problem').innerText.includes('no context of this name')")
        page.errors.clear()
    with browser.page(context_page(url, AWAY)) as page:
        page.until("document.querySelector('#layer option') !== null")
        page.click("button[value=plan]")
        page.until("document.querySelector('#plan').innerText.includes('is on disk')")
        page.errors.clear()


def test_a_server_that_is_gone_is_said_and_what_was_there_stays(browser, url, monkeypatch):
    with browser.page(f"{url}/ui/") as page:
        home(page)
        page.send("Network.emulateNetworkConditions", offline=True, latency=0, downloadThroughput=0, uploadThroughput=0)
        page.until("document.querySelector('#problem').innerText.includes('does not answer')")
        assert BASE in page.text("#contexts")
        page.send("Network.emulateNetworkConditions", offline=False, latency=0, downloadThroughput=-1, uploadThroughput=-1)
        page.until("document.querySelector('#problem').hidden")
        page.errors.clear()


def test_many_contexts_come_in_pages(browser, open_console, engine):
    rng = np.random.default_rng(2)
    for number in range(api.PAGE_MAX + 5):
        store(engine, f"c{number:03d}", np.array([number], np.int32), rng, Retention())
    with browser.page(f"{open_console(engine)}/ui/") as page:
        page.until("document.querySelectorAll('#contexts tbody tr').length === 50")
        page.click("#next")
        page.until("document.querySelector('#contexts a').textContent === 'c050'")
        page.click("#next")
        page.until("document.querySelectorAll('#contexts tbody tr').length === 5 && document.querySelector('#next').disabled")
        page.click("#previous")
        page.until("document.querySelector('#contexts a').textContent === 'c050'")
        page.value("document.querySelector('#prefix').focus()")
        page.type("c10")
        page.until("document.querySelectorAll('#contexts tbody tr').length === 5")
        assert page.text("#contexts a") == "c100"


def test_nothing_moves_when_numbers_come(browser, url):
    script = "new PerformanceObserver((list) => list.getEntries().forEach((e) => (window.moved = (window.moved ?? 0) + e.value)))"
    with browser.page(f"{url}/ui/") as page:
        home(page)
        page.value(f"{script}.observe({{ type: 'layout-shift', buffered: true }})")
        seen = len(page.requests)
        page.until(f"performance.getEntriesByType('resource').length >= {seen + 3}")
        assert page.value("window.moved ?? 0") < 0.02
