"""The page of the HTTP port: what is served, and what it does in a browser."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from contextlib import asynccontextmanager
from importlib.util import find_spec
from typing import Any

import pytest

from cluster.api.keys import ApiKeys, new_key, write_keys
from cluster.page import PAGE, POLICY, explained_page
from cluster.router.allowance import KeyLimits
from tests.cluster.test_http_reasoning import QWEN3
from tests.support.edge import EdgePeers, ingress
from tests.support.http_api import http_at, raw
from tests.support.scripted import scripted, scripted_tokenizer

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or ""
NO_BROWSER = "needs Debian's package chromium" if not CHROMIUM else "needs the package playwright"
in_chromium = pytest.mark.skipif(not CHROMIUM or find_spec("playwright") is None, reason=NO_BROWSER)
GET = b"GET / HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n"


async def test_the_page_is_served_with_a_policy_that_allows_its_own_script_alone():
    async with http_at() as (server, _):
        status, headers, body = await raw(server, GET)
    assert status == 200 and headers["content-type"].startswith("text/html") and body.decode() == PAGE
    assert headers["x-content-type-options"] == "nosniff" and headers["content-security-policy"] == POLICY
    allowed = dict(part.split(" ", 1) for part in POLICY.split("; "))
    assert allowed["default-src"] == allowed["base-uri"] == allowed["form-action"] == allowed["frame-ancestors"]
    assert allowed["default-src"] == "'none'" and allowed["connect-src"] == "'self'" and "unsafe" not in POLICY
    for tag in ("script", "style"):
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", PAGE, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()
        assert allowed[f"{tag}-src"] == f"'sha256-{digest}'"


def test_the_page_loads_nothing_and_has_no_markup_made_of_text():
    assert not re.findall(r"(?:src|href)=\"(?!data:,)", PAGE) and "url(" not in PAGE and "@import" not in PAGE
    assert not re.findall(r"\bon\w+=\"|style=\"|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", PAGE)
    assert not re.findall(r"localStorage|sessionStorage|indexedDB|document\.cookie", PAGE)  # the key is in memory alone


def test_every_field_of_the_page_has_a_label_and_its_state_is_announced():
    fields = re.findall(r"<(?:input|select|textarea)[^>]*\bid=\"(\w+)\"", PAGE)
    assert len(fields) == 7
    assert all(f'<label for="{each}">' in PAGE or f'id="{each}" aria-label=' in PAGE for each in fields)
    assert PAGE.count('role="status"') == PAGE.count('role="alert"') == 1 and '<html lang="en">' in PAGE


def test_an_explained_page_is_a_file_whose_data_cannot_end_its_block():
    text = "</script><script>alert(1)</script><!--"
    page = explained_page([{"rounds": [{"text": text}]}])
    (data,) = re.findall(r'<script type="application/json" id="explained">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data)[0]["rounds"][0]["text"] == text
    assert page.count("<script") == PAGE.count("<script") and "http-equiv" in page and "connect-src" not in page


@asynccontextmanager
async def browsing(address: str):
    """Yields a page in headless Chromium, and the errors and violations that it reports."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page, faults = await browser.new_page(), []
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        await page.goto(address)
        yield page, faults
        await browser.close()


async def sent(page: Any, text: str, how: str = "auto", most: int = 24) -> str:
    """Send a text by the keyboard. Returns what the page says at the answer's end."""
    await page.check(f"input[value={how}]")
    await page.fill("#most", str(most))
    await page.fill("#prompt", text)
    await page.keyboard.press("Control+Enter")
    await page.locator("#send:enabled").wait_for()
    return await page.inner_text("#state")


@in_chromium
@pytest.mark.slow
async def test_a_browser_shows_rounds_their_trees_and_both_ways_side_by_side():
    made = ingress(EdgePeers(), speculation={"arms": ["(2,1)"]})
    async with http_at(served_ingress=made) as (server, _), browsing(f"http://{server.address}/") as (page, faults):
        await page.locator("#model option").wait_for(state="attached")
        result = await sent(page, "hello <b>&amp;</b>", "both")
        assert result.startswith("The same tokens: ") and await page.locator("article.card").count() == 2
        answers = await page.locator(".card > .answer").all_text_contents()
        assert answers[0] == answers[1] != "" and await page.inner_text(".asked") == "hello <b>&amp;</b>"
        assert await page.locator("svg[role=img]").count() == 1
        assert "Accepted: " in (await page.get_attribute("svg", "aria-label"))
        await page.locator(".card > .answer").nth(1).focus()
        await page.keyboard.press("Home")
        assert (await page.inner_text("#title")).startswith("Round 1 of ")
        await page.keyboard.press("ArrowRight")
        assert (await page.inner_text("#title")).startswith("Round 2 of ")
        assert await page.locator("[aria-current=true]").count() >= 1
        assert await page.locator("tbody th").all_text_contents() != []
        await page.click("#after")
        assert (await page.inner_text("#title")).startswith("Round 3 of ")
        assert not faults


def test_reasoning_has_a_part_of_its_own_with_a_name_for_screen_readers():
    assert 'made("summary", {}, "Reasoning")' in PAGE and "`Reasoning, ${name}; arrow keys choose a round`" in PAGE
    assert "choice?.delta?.reasoning_content" in PAGE


@in_chromium
@pytest.mark.slow
async def test_a_browser_shows_reasoning_apart_from_the_answer_and_both_by_the_keyboard(tmp_path):
    async with scripted(scripted_tokenizer(tmp_path, QWEN3)) as asked:
        asked.peers.will_say("<think>\nHm, <b>5.\n</think>\n\nIt is 5.")
        async with browsing(f"http://{asked.server.address}/") as (page, faults):
            await page.locator("#model option").wait_for(state="attached")
            assert (await sent(page, "hello", most=64)).startswith("Answered")
            reasoning = page.get_by_role("group", name="Reasoning, speculation auto; arrow keys choose a round")
            answer = page.get_by_role("group", name="Answer, speculation auto; arrow keys choose a round")
            assert await reasoning.inner_text() == "Hm, <b>5." and await answer.inner_text() == "It is 5."
            await reasoning.focus()
            await page.keyboard.press("Home")
            for at in range(len("<think>\nHm")):
                assert (await page.inner_text("#title")).startswith(f"Round {at + 1} of ")
                await page.keyboard.press("ArrowRight")
            assert await reasoning.locator("[aria-current=true]").count() == 1
            assert await answer.locator("[aria-current=true]").count() == 0
            await page.keyboard.press("End")
            assert await reasoning.locator("[aria-current=true]").count() == 0
            await reasoning.focus()
            await page.keyboard.press("Shift+Tab")
            assert await page.evaluate("document.activeElement.tagName") == "SUMMARY"
            await page.keyboard.press("Enter")
            assert not await reasoning.is_visible() and await answer.is_visible()
            assert await page.evaluate("messages[1].content") == "It is 5."
            assert not faults
            asked.peers.will_say("Plain.")
            assert (await sent(page, "hello", most=64)).startswith("Answered")
            assert await page.locator("details.thought").first.is_hidden()
            assert await page.locator(".card > .answer").first.inner_text() == "Plain." and not faults


@in_chromium
@pytest.mark.slow
async def test_a_browser_keeps_the_key_in_memory_and_sends_the_conversation(tmp_path):
    key, kept = new_key("alice", "alice", KeyLimits())
    write_keys(tmp_path / "keys.json", ApiKeys(keys=(kept,)))
    secured = http_at(auth={"keys": tmp_path / "keys.json"})
    async with secured as (server, _), browsing(f"http://{server.address}/") as (page, faults):
        await page.locator("#wrong").wait_for()
        assert "wants an API key" in await page.inner_text("#wrong")
        assert await page.evaluate("document.activeElement.id") == "key"
        await page.fill("#key", key)
        await page.keyboard.press("Tab")
        await page.locator("#model option").wait_for(state="attached")
        assert (await sent(page, "hello")).startswith("Answered: 24 tokens")
        assert (await sent(page, "again")).startswith("Answered: 24 tokens")
        assert await page.evaluate("messages.map((each) => each.role).join()") == "user,assistant,user,assistant"
        await page.reload()
        assert await page.input_value("#key") == "" and key not in await page.content()
        assert all("401" in each for each in faults)  # the browser's own lines


@in_chromium
@pytest.mark.slow
async def test_a_browser_stops_an_answer():
    peers = EdgePeers()
    peers.pause_s = 0.02
    async with http_at(peers) as (server, requests), browsing(f"http://{server.address}/") as (page, faults):
        await page.locator("#model option").wait_for(state="attached")
        await page.fill("#most", "400")
        await page.fill("#prompt", "hello")
        await page.click("#send")
        await page.locator(".answer span").nth(2).wait_for(state="attached")
        await page.click("#stop")
        await peers.all_closed.wait()
        await page.locator("#send:enabled").wait_for()
        assert "not part of the conversation" in await page.inner_text("#state") and not faults


@in_chromium
@pytest.mark.slow
async def test_text_that_was_held_back_belongs_to_the_last_round():
    """The first round held all of its text back, and no round but the last has any of the answer's."""
    added = """() => {
        const pane = new Pane(document.body, "held");
        pane.add("", {});
        pane.add("", {}, "Hm");
        pane.append("5.", " yes");
        return pane.rounds.map((each) => each.spans.map((span) => span.textContent));
    }"""
    async with http_at() as (server, _), browsing(f"http://{server.address}/") as (page, faults):
        assert await page.evaluate(added) == [[""], ["Hm yes", "5."]]
        assert not faults
