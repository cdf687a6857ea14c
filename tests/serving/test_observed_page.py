"""The page ``/ext/ui`` in a real browser, on a real server.

With SCREENSHOTS=docs/images in the environment it also renews the pictures of the documentation.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.serving.load import Load
from tests.serving.observed import TENANTS, Observed

pytest.importorskip("selenium")

from selenium.webdriver.common.keys import Keys

from tests.serving.browser import Browser, is_installed

pytestmark = [
    pytest.mark.serving,
    pytest.mark.skipif(
        not is_installed(),
        reason="Chromium is not installed; Debian's packages chromium and chromium-driver: "
        "make tools",
    ),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.quit()


@pytest.fixture(scope="module")
def load(observed: Observed) -> Load:
    """Conversations that share a beginning, so that the tree has branches."""
    load = Load(observed)
    for turns in (2, 3):
        for tenant, talks in zip(TENANTS, (5, 2, 3), strict=True):
            for talk in range(talks):
                load.conversations(tenant, f"page {talk}", turns, 60 + 40 * talk)
    return load


@pytest.fixture
def page(browser: Browser, observed: Observed, load: Load) -> Browser:
    """The page, signed in and filled."""
    browser.size(1280, 1700)
    browser.colours("light")
    browser.open(observed.server.url + "/ext/ui")
    browser.errors()
    browser.sign_in("key-admin")
    browser.wait(lambda: browser.text("status").startswith("Live"))
    return browser


def _row(page: Browser, table: str, name: str) -> list[str]:
    """Return the cells of a table's row that has this name."""
    rows = page.script(
        f"[...document.querySelectorAll('#{table} tbody tr')]"
        ".map(row => [...row.children].map(cell => cell.textContent))"
    )
    (found,) = [row for row in rows if row[0] == name]
    return [str(cell) for cell in found]


def test_it_shows_what_the_load_did(page: Browser, observed: Observed, load: Load) -> None:
    page.wait(lambda: all(_requests(page, tenant) >= _sent(load, tenant) for tenant in TENANTS))
    for tenant in TENANTS:
        counts = load.counts[tenant]
        hits = counts["prompt_tokens"] - counts["computed_tokens"]
        rate = float(_row(page, "tenants", tenant)[3].removesuffix(" %"))
        assert 100 * hits / counts["prompt_tokens"] - 0.1 <= rate <= 100
        assert _row(page, "policy", tenant)[1] == "private"
    assert _row(page, "policy", "b")[4].startswith("hbm 1ktok")
    tree = observed.client("admin").get("/ext/v1/tree").json()["ranks"][0]
    page.wait(lambda: page.count("#tree rect") == tree["runs_total"])
    assert page.count("#tiers .tier") == 3
    assert page.count("#tiers .tier:first-child .bar span") >= 3
    assert page.count(".spark rect") >= 3
    assert 0 < page.count("#slow tbody tr") <= 20
    tiles = page.text("service").splitlines()
    assert tiles[tiles.index("Pages lost on disk") + 1] == "0"
    assert page.count("#service div:last-child .over") == 0
    assert page.errors() == []
    _picture(page, "page-light.png")


def _requests(page: Browser, tenant: str) -> int:
    return int(_row(page, "tenants", tenant)[1].replace(",", ""))


def _sent(load: Load, tenant: str) -> int:
    return load.counts[tenant]["requests"]


def _picture(page: Browser, name: str) -> None:
    folder = os.environ.get("SCREENSHOTS")
    if folder:
        page.picture(Path(folder) / name)


def test_it_updates_without_a_reload(page: Browser, load: Load) -> None:
    page.script("window.stayed = true")
    before = _requests(page, "c")
    load.conversations("c", "live", 2)
    page.wait(lambda: _requests(page, "c") == before + 2)
    assert page.script("window.stayed") is True
    page.element("pause").click()
    assert page.text("status") == "Paused"
    page.element("pause").click()
    page.wait(lambda: page.text("status").startswith("Live"))
    assert page.errors() == []


@pytest.mark.parametrize(
    ("key", "told"),
    [
        ("key-of-nobody", "does not know this key"),
        ("key-a", "needs the admin key"),
        ("a key of words", "without spaces"),
        ("schlüssel", "without spaces"),
    ],
)
def test_it_refuses_any_other_key(
    browser: Browser, observed: Observed, key: str, told: str
) -> None:
    browser.open(observed.server.url + "/ext/ui")
    assert not browser.element("main").is_displayed()
    browser.sign_in(key)
    browser.wait(lambda: told in browser.text("refusal"))
    browser.wait(lambda: not browser.element("main").is_displayed())
    assert browser.count("#tenants tr, #tiers .tier, #tree rect, #policy tr") == 0
    assert browser.script("sessionStorage.length") == 0


def test_the_key_stays_in_its_tab(page: Browser) -> None:
    assert page.script("Object.values(sessionStorage)") == ["key-admin"]
    assert page.script("localStorage.length") == 0
    assert page.script("document.cookie") == ""
    assert "key-admin" not in page.script("location.href")
    first, url = page.driver.current_window_handle, page.script("location.href")
    page.driver.switch_to.new_window("tab")
    page.driver.get(url)
    page.wait(lambda: page.element("key").is_displayed())
    page.driver.close()
    page.driver.switch_to.window(first)
    page.element("forget").click()
    assert page.element("key").is_displayed()
    assert page.script("sessionStorage.length") == 0
    assert page.script("document.activeElement.id") == "key"


def test_the_tree_can_be_walked_by_keyboard_and_coloured_by_tier(page: Browser) -> None:
    page.wait(lambda: page.count("#tree rect") > 3)
    page.element("by-owner").send_keys(Keys.TAB, Keys.SPACE)
    assert page.element("by-tier").get_attribute("aria-pressed") == "true"
    assert page.count("#tree rect.hbm") > 0
    page.element("by-tier").send_keys(Keys.TAB)
    assert page.script("document.activeElement.tagName") == "svg"
    page.driver.switch_to.active_element.send_keys(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert "tokens from token" in page.text("run")
    assert page.count("#tree rect.chosen") == 1
    # It keeps the choice, and the focus, when the server is asked again.
    page.driver.execute_script("document.getElementById('by-owner').click()")
    page.wait(lambda: page.count("#tree rect.c0") > 0)
    assert "tokens from token" in page.text("run")
    assert page.errors() == []


def test_it_is_dark_where_people_prefer_that(page: Browser) -> None:
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.script(colour)
    page.colours("dark")
    assert page.script(colour) != light
    page.element("by-tier").click()
    _picture(page, "page-dark.png")


def test_it_fits_a_narrow_screen(page: Browser) -> None:
    page.size(390, 2400)
    page.wait(lambda: page.script("innerWidth") == 390)
    assert page.script("document.documentElement.scrollWidth") <= 390
    assert page.element("pause").is_displayed()
    _picture(page, "page-narrow.png")


def test_everything_comes_from_the_server_itself(page: Browser, observed: Observed) -> None:
    loaded = page.script("performance.getEntriesByType('resource').map(entry => entry.name)")
    assert loaded
    assert all(name.startswith(observed.server.url + "/ext/") for name in loaded)


def test_its_parts_need_no_key_and_nothing_else_is_open(observed: Observed) -> None:
    url = observed.server.url
    for path in ("/ext/ui", "/ext/ui/app.js", "/ext/ui/draw.js", "/ext/ui/style.css"):
        answer = httpx.get(url + path)
        assert answer.status_code == 200
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert httpx.get(url + "/ext/ui/", follow_redirects=True).status_code == 200
    for path in ("/ext/v1/overview", "/ext/v1/tree", "/ext/ui/index.html", "/ext/ui/../v1/tree"):
        assert httpx.get(url + path).status_code == 401
    admin = observed.client("admin")
    assert admin.get("/ext/ui/__init__.py").status_code == 404
    assert admin.get("/ext/ui/..%2fobserve%2froutes.py").status_code == 404
