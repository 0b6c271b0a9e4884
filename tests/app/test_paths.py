"""Which paths clients reach, and what the others say."""

from pdproxy.intake import routes
from pdproxy.settings.model import Settings
from tests.app.running_proxy import running_proxy


async def test_each_forwarded_path_reaches_a_node_by_its_methods() -> None:
    async with running_proxy(Settings()) as proxy:
        for path, methods in routes.FORWARDED.items():
            for method in methods:
                answered = await proxy.client.request(method, path, json={"model": "m"})
                assert (answered.status_code, answered.json()["path"]) == (200, path), (method, path)


async def test_a_slash_at_the_end_is_served_as_without_it() -> None:
    async with running_proxy(Settings()) as proxy:
        body = {"model": "m", "prompt": "one two", "max_tokens": 2}
        for path, sent in (("/v1/completions/", body), ("/v1/embeddings/", {"model": "m", "input": "a"})):
            assert (await proxy.client.post(path, json=sent)).status_code == 200
        for path in ("/v1/models/", "/health/"):
            assert (await proxy.client.get(path)).status_code == 200


async def test_a_withheld_path_says_why_in_openais_shape_and_reaches_no_node() -> None:
    async with running_proxy(Settings()) as proxy:
        for path in routes.WITHHELD:
            seen = len(proxy.decode.seen)
            answered = await proxy.client.post(path, json={"model": "m"})
            assert answered.status_code == (501 if path == routes.REALTIME else 404), path
            assert set(answered.json()["error"]) == {"message", "type", "param", "code"}
            assert path not in [each.path for each in proxy.decode.seen[seen:]]


async def test_a_websocket_is_answered_with_501() -> None:
    handshake = {"connection": "Upgrade", "upgrade": "websocket", "sec-websocket-version": "13"}
    async with running_proxy(Settings()) as proxy:
        answered = await proxy.client.get("/v1/realtime", headers=handshake | {"sec-websocket-key": "YQ=="})
        assert (answered.status_code, answered.json()["error"]["code"]) == (501, "no_websockets")


async def test_what_only_nodes_may_set_is_taken_out_of_bodies_that_reach_an_engine() -> None:
    forged = {"do_remote_prefill": True, "remote_host": "127.0.0.1"}
    body = {"model": "m", "kv_transfer_params": forged, "vllm_xargs": {"kv_transfer_params": forged, "kept": 1}}
    async with running_proxy(Settings()) as proxy:
        for path in routes.SCRUBBED:
            assert (await proxy.client.post(path, json=body)).status_code == 200
            received = next(each.body for each in proxy.decode.seen if each.path == path)
            assert received == {"model": "m", "vllm_xargs": {"kept": 1}}, path


async def test_a_text_that_utf8_cannot_write_is_refused() -> None:
    async with running_proxy(Settings()) as proxy:
        body = b'{"model":"\\ud800","prompt":"a"}'
        headers = {"content-type": "application/json"}
        answer = await proxy.client.post("/v1/completions", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_value")
