"""The page in a real browser: streaming, stopping, tokens under pointer and keyboard, errors, both themes."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import page_server

sync_api = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium"),
    pytest.mark.xdist_group("browser"),
]
TEXT = b"".join(t if isinstance(t, bytes) else t.encode() for t, _, _ in page_server.SCRIPT).decode()


@pytest.fixture(scope="module")
def browser():
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking"],
        )
        yield browser
        browser.close()


@pytest.fixture
def server():
    server = page_server.serve()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def page(browser, server):
    """A page on the stand-in, which fails the test on any script error or request to elsewhere."""
    context = browser.new_context(color_scheme="light", viewport={"width": 1280, "height": 860})
    page = context.new_page()
    page.set_default_timeout(8000)
    root, wrong = f"http://127.0.0.1:{server.server_port}/", []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda r: None if r.url.startswith((root, "data:")) else wrong.append(r.url))
    page.goto(root)
    sync_api.expect(page.locator("#model")).to_contain_text("smollm2-135m")
    yield page
    context.close()
    assert not wrong


def ask(page, text: str) -> None:
    page.get_by_label("Message").fill(text)
    page.keyboard.press("Enter")


def finished(page) -> None:
    sync_api.expect(page.get_by_role("button", name="Send")).to_be_enabled()


def test_an_answer_streams_and_its_tokens_say_who_proposed_them(page, server):
    page.get_by_label("Temperature").fill("0.7")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Max tokens").fill("64")
    ask(page, "Why is the sky blue?")
    finished(page)
    body = page.locator(".assistant .body")
    assert body.inner_text() == TEXT
    assert body.locator("b").count() == 0, "text is text, not markup"
    found = [(t.inner_text(), t.get_attribute("data-origin")) for t in body.locator(".token").all()]
    assert found[:6] == [
        ("The", None), (" sky", "0"), (" looks", "0"), (" blue", None), (" because", "1"), (" of", "1"),
    ]  # fmt: skip
    asked = server.asked[0]
    assert asked["messages"] == [{"role": "user", "content": "Why is the sky blue?"}]
    assert (asked["temperature"], asked["seed"], asked["max_tokens"], asked["stream"]) == (0.7, 7, 64, True)
    assert asked["foretell"] == {"tokens": True, "top": 5, "draft": True}
    foot = page.locator(".assistant .foot").inner_text()
    assert "20 tokens · 98.4 tokens/s · 2.40\u00d7 plain · 9 of 14 drafted kept · AL 2.80" in foot
    assert "lossless · seed 7 · ended" in foot


def test_the_conversation_goes_on_and_begins_anew(page, server):
    for text in ("one", "two"):
        ask(page, text)
        finished(page)
    roles = [message["role"] for message in server.asked[1]["messages"]]
    assert roles == ["user", "assistant", "user"]
    assert server.asked[1]["messages"][1]["content"] == TEXT
    page.get_by_role("button", name="New chat").click()
    assert page.locator(".message").count() == 0
    ask(page, "three")
    finished(page)
    assert len(server.asked[2]["messages"]) == 1


def test_without_a_seed_the_page_draws_one_that_can_be_used_again(page, server):
    page.get_by_label("Temperature").fill("1")
    for text in ("one", "two"):
        ask(page, text)
        finished(page)
    seeds = [body["seed"] for body in server.asked]
    assert seeds[0] != seeds[1]
    assert f"seed {seeds[1]} · ended" in page.locator(".assistant .foot").nth(1).inner_text()
    page.get_by_label("Temperature").fill("0")
    ask(page, "three")
    finished(page)
    assert "seed" not in server.asked[2], "nothing is drawn"
    assert "greedy · ended" in page.locator(".assistant .foot").nth(2).inner_text()


def test_another_drafter_for_one_request(page, server):
    page.get_by_label("Drafter").select_option("none")
    ask(page, "plain, please")
    finished(page)
    assert server.asked[0]["foretell"]["draft"] is False
    assert page.locator(".token[data-origin]").count() == 2, "only those of the legend"


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop_ends_the_request(how, page, server):
    ask(page, "slow and long")
    sync_api.expect(page.locator(".assistant .token").nth(3)).to_be_visible()
    assert page.get_by_role("button", name="Send").is_disabled()
    if how == "button":
        page.get_by_role("button", name="Stop").click()
    else:
        page.keyboard.press("Escape")
    finished(page)
    assert "Stopped." in page.locator(".assistant").inner_text()
    assert server.gone.wait(5), "the server hears of it"
    sync_api.expect(page.get_by_role("button", name="Stop")).to_be_hidden()


def test_pointer_and_keyboard_show_a_token(page):
    ask(page, "hello")
    finished(page)
    tip, detail = page.get_by_role("tooltip"), page.locator("#detail")
    page.locator(".assistant .token").nth(2).hover()
    sync_api.expect(tip).to_contain_text("drafted by suffix, place 2 in its draft, 77.9 %")
    assert re.search(r"3\. +looks.*Id 102.*77\.9 %.*⏎.*13\.5 %", detail.inner_text(), re.S)
    page.mouse.move(5, 5)
    sync_api.expect(tip).to_be_hidden()
    page.get_by_role("group", name="Answer").focus()
    for key in ("End", "ArrowLeft", "ArrowLeft"):
        page.keyboard.press(key)
    sync_api.expect(detail).to_contain_text("bytes c3")
    sync_api.expect(tip).to_contain_text("the model's own, place 1 in its step")
    page.keyboard.press("Home")
    sync_api.expect(detail).to_contain_text("1. The")


def test_plots_follow_the_answer_and_the_server(page):
    sync_api.expect(
        page.get_by_role("img", name="Acceptance by position: 40 drafts, AL 2.60")
    ).to_be_visible()
    assert page.locator("#acceptance rect").count() == 8
    sync_api.expect(page.get_by_role("img", name="plain decoding: 41")).to_be_visible()
    ask(page, "hello")
    finished(page)
    # steps of 1, 3, 4, 1, 5 tokens, then six of one
    sync_api.expect(page.get_by_role("img", name="Tokens per step: mean 1.82 over 11 steps")).to_be_visible()
    assert page.locator("#steps rect.drafted").count() == 11
    points = page.locator("#rate polyline").get_attribute("points").split()
    assert len(points) == 9, "ten chunks, and no rate at the first"


def test_errors_are_shown_and_nothing_is_lost(page, server):
    ask(page, "please fail")
    finished(page)
    alert = page.locator(".assistant [role=alert]")
    sync_api.expect(alert).to_contain_text("Failed: max_tokens must be at least 1, got 0.")
    assert page.get_by_label("Message").input_value() == "please fail"
    ask(page, "break off")
    finished(page)
    sync_api.expect(alert.nth(1)).to_contain_text("the connection ended before the answer did")
    assert page.locator(".assistant .body").nth(1).inner_text().startswith("The sky looks")
    server.down = True
    sync_api.expect(page.locator("#banner")).to_contain_text("does not answer: HTTP status 503")
    server.down = False
    page.get_by_role("button", name="Try again").click()
    sync_api.expect(page.locator("#banner")).to_be_hidden()


def test_settings_out_of_range_are_not_sent(page, server):
    page.get_by_label("Temperature").fill("-1")
    ask(page, "hello")
    assert not server.asked
    assert page.get_by_label("Message").input_value() == "hello"


def test_the_theme_follows_the_system_until_it_is_chosen(page):
    theme = "document.documentElement.dataset.theme"
    assert page.evaluate(theme) == "light"
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"{theme} === 'dark'")
    page.get_by_role("button", name="Dark").click()
    assert page.evaluate(theme) == "light"
    page.reload()
    assert page.evaluate(theme) == "light"


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_can_be_read_in_both_themes(theme, page):
    """Contrast of at least 4.5 between text and what is behind it (WCAG AA), tinted tokens included."""
    page.emulate_media(color_scheme=theme)
    ask(page, "please fail")
    finished(page)
    ask(page, "hello")
    finished(page)
    page.locator(".assistant .token").nth(1).hover()
    script = (Path(__file__).parent / "assets" / "contrast.js").read_text()
    low = [entry for entry in page.evaluate(script) if entry["ratio"] < 4.5]
    assert not low


def test_every_control_has_a_name_and_can_be_tabbed_to(page):
    names = []
    page.get_by_label("Message").focus()
    for _ in range(12):
        names.append(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert {"prompt", "send", "drafter", "temperature", "seed", "max-tokens"} <= set(names)
    nameless = page.evaluate(
        "[...document.querySelectorAll('input, select, textarea')].filter(e => !e.labels.length).length"
    )
    assert nameless == 0
    assert page.evaluate("[...document.querySelectorAll('button')].every(e => e.textContent.trim())")


def test_a_narrow_window_needs_no_sideways_scrolling(page):
    page.set_viewport_size({"width": 380, "height": 700})
    ask(page, "hello")
    finished(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 380


def test_the_real_server_behind_its_key(browser, tmp_path, monkeypatch):
    """Files, headers, shapes and key of the server itself; tokens are parts of characters here."""
    from foretell.api import LLM
    from foretell.types import SamplingParams
    from tests import gguf_files
    from tests.serving import serving

    monkeypatch.setenv("FORETELL_HOME", str(tmp_path))
    gguf_files.write(tmp_path / "tiny.gguf")
    made = []

    def make() -> LLM:
        made.append(LLM(tmp_path / "tiny.gguf", drafter="suffix", draft_tokens=4))
        return made[0]

    with serving(make, api_key="secret") as running:
        context = browser.new_context()
        page, wrong = context.new_page(), []
        page.set_default_timeout(8000)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(f"{running.url}/")
        sync_api.expect(page.locator("#banner")).to_contain_text("wants its API key")
        page.get_by_label("Key").fill("secret")
        page.keyboard.press("Enter")
        sync_api.expect(page.locator("#model")).to_contain_text(
            "tiny.gguf, drafter suffix, verified by coupled"
        )
        page.get_by_label("Max tokens").fill("40")
        for text in ("the", "again"):
            ask(page, text)
            finished(page)
        texts = [body.text_content() for body in page.locator(".assistant .body").all()]
        facts = page.locator(".assistant .foot").last.inner_text()
        assert page.locator(".assistant .token").count() == 80
        context.close()
        assert not wrong
    plain = LLM(made[0].loaded, drafter="none")
    talk = [{"role": "user", "content": "the"}]
    first = plain.generate(talk, SamplingParams(max_tokens=40))[0].text
    talk += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    assert texts == [first, plain.generate(talk, SamplingParams(max_tokens=40))[0].text]
    assert "40 tokens" in facts
