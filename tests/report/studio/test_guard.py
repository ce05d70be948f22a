"""Who may ask: other origins, other names for this server, writing, and missing tokens are refused, over real HTTP."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from penstock.report.studio.app import Studio, assets
from penstock.report.studio.guard import ENTER, Guard, is_loopback
from penstock.report.studio.library import Library

TOKEN = "s3cret-token"
HOST = "127.0.0.1:8470"


def client(folder: Path, host: str = "127.0.0.1", token: str = TOKEN) -> TestClient:
    app = Studio(Library(folder), Guard.of(host, 8470, TOKEN)).app()
    headers = {"authorization": f"Bearer {token}"} if token else {}
    return TestClient(app, base_url=f"http://{HOST}", headers=headers)


@pytest.mark.parametrize("name", ["127.0.0.1:8470", "localhost:8470", "[::1]:8470", "LOCALHOST:8470"])
def test_own_names_are_answered(tmp_path: Path, name: str) -> None:
    assert client(tmp_path).get("/api/catalog", headers={"host": name}).status_code == 200


FOREIGN = ["evil.example", "evil.example:8470", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", "", "@"]
FOREIGN += ["[::1", "localhost", "localhost:9000", "localhost:8470:8470", "localhost:08470", "localhost.:8470"]
FOREIGN += ["127.0.0.2:8470", "0.0.0.0:8470", "me@localhost:8470", "localhost:8470/", "localhost:8470, evil.example"]
ORIGINS = ["http://evil.example", "null", "http://localhost:8470", "http://127.0.0.1:9999", "file://"]
ORIGINS += [f"http://{HOST}.evil.example"]


@pytest.mark.parametrize("name", FOREIGN)
def test_a_name_made_to_point_here_is_refused(tmp_path: Path, name: str) -> None:
    refused = client(tmp_path).get("/api/catalog", headers={"host": name})
    assert refused.status_code == 421
    assert "schedules" not in refused.text


@pytest.mark.parametrize("origin", ORIGINS)
def test_other_origins_are_refused(tmp_path: Path, origin: str) -> None:
    assert client(tmp_path).get("/api/catalog", headers={"origin": origin}).status_code == 403


def test_its_own_origin_is_answered_and_no_other_may_read(tmp_path: Path) -> None:
    answered = client(tmp_path).get("/api/catalog", headers={"origin": f"http://{HOST}"})
    assert answered.status_code == 200
    assert not [name for name in answered.headers if name.startswith("access-control")]


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_pages_of_other_sites_cannot_keep_it_busy(tmp_path: Path, site: str) -> None:
    image = {"sec-fetch-site": site, "sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
    frame = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "iframe"}
    link = {"sec-fetch-site": site, "sec-fetch-mode": "navigate", "sec-fetch-dest": "document"}
    studio = client(tmp_path)
    assert studio.get("/api/search", headers=image).status_code == 403
    assert studio.get("/", headers=frame).status_code == 403
    assert studio.get("/", headers=link).status_code == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_but_reading(tmp_path: Path, method: str) -> None:
    assert client(tmp_path).request(method, "/api/catalog").status_code == 405


def test_every_answer_says_what_the_page_may_do(tmp_path: Path) -> None:
    studio = client(tmp_path)
    for path in ("/", "/api/catalog", "/static/studio/studio.js", "/nothing", "/api/open?name=../x"):
        headers = studio.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"  # a token in an address goes nowhere else


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for name, (_, text) in assets().items():
        assert not re.search("https?://", text.replace("http://www.w3.org/2000/svg", "")), name


def test_what_only_looks_like_this_machine_is_not() -> None:
    hosts = ["0.0.0.0", "::", "10.0.0.1", "example.com", "localhost.example.com", "127.0.0.1.nip.io", ""]
    assert not any(map(is_loopback, hosts))


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_token_is_asked_for_by_all_but_the_page_itself(tmp_path: Path, host: str) -> None:
    """The page is the same for everybody; it takes the token from the fragment of the link."""
    routes = Studio(Library(tmp_path), Guard.of(host, 8470, TOKEN)).app()._app.routes  # type: ignore[attr-defined]
    paths = {route.path.format(folder="studio", name="studio.js", kind="csv") for route in routes}
    assert {"/", ENTER, "/report", "/export/csv", "/api/open", "/static/studio/studio.js"} <= paths
    for path in (*paths, "/nothing", "//api/catalog", "/static", "/STATIC/studio/studio.js"):
        public = path in ("/", "/static/studio/studio.js")
        for token in ("", "wrong", TOKEN[:-1], f"{TOKEN} "[1:]):
            answered = client(tmp_path, host, token).get(path, params={"token": TOKEN})
            assert (answered.status_code == 200) == public, path
            assert (answered.status_code == 401) != public, path
            assert "set-cookie" not in answered.headers
        assert client(tmp_path, host).get(path).status_code != 401
    for path in ("/static/%2e%2e/api/catalog", "/static/..%2fapi/catalog", "/static/x/..%2f..%2fapi/catalog"):
        assert client(tmp_path, host, "").get(path).status_code == 404


def test_the_token_is_left_in_a_cookie(tmp_path: Path) -> None:
    studio = client(tmp_path, token="")
    assert studio.get(ENTER, headers={"authorization": f"bearer {TOKEN}"}).status_code == 200
    assert studio.get("/api/catalog").status_code == 200  # the client keeps cookies
    cookie = client(tmp_path).get(ENTER).headers["set-cookie"].lower()
    assert cookie.startswith("penstock-studio-8470=")
    assert "httponly" in cookie
    assert "samesite=strict" in cookie


def test_on_other_addresses_it_answers_to_addresses_but_not_to_other_names(tmp_path: Path) -> None:
    studio = client(tmp_path, "0.0.0.0")
    for name, status in (
        ("10.1.2.3:8470", 200),
        ("[fe80::1]:8470", 200),
        ("localhost:8470", 200),
        ("10.1.2.3", 421),
        ("fe80::1:8470", 421),
        ("evil.example:8470", 421),
    ):
        assert studio.get("/api/catalog", headers={"host": name}).status_code == status, name
    assert client(tmp_path, "box.lan").get("/", headers={"host": "box.lan:8470"}).status_code == 200
    usual = TestClient(Studio(Library(tmp_path), Guard.of("127.0.0.1", 80, TOKEN)).app(), base_url="http://localhost")
    assert usual.get("/").status_code == 200


def test_long_addresses_and_doubled_parameters_are_refused(tmp_path: Path) -> None:
    studio = client(tmp_path)
    assert studio.get("/api/simulate", params={"schedules": "1f1b," * 2000}).status_code == 414
    twice = studio.get("/api/simulate?ranks=2&ranks=3")
    assert (twice.status_code, twice.json()) == (400, {"error": "a parameter is repeated; pass each once"})
