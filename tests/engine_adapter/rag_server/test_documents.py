"""Documents by themselves: put, described, listed and deleted."""

URL = "/v1/documents"


def test_a_document_is_put_described_and_deleted(client, rag):
    put = client.put(f"{URL}/law%2F1", json={"text": "some text", "ttl": 60, "pinned": True, "metadata": {"by": "Ada"}})
    assert put.status_code == 200, put.text
    assert put.json()["id"] == "law/1"
    described = client.get(f"{URL}/law/1").json()
    assert (described["id"], described["pinned"]) == ("law/1", True)
    assert 0 < described["expires_seconds"] <= 60
    assert [one["id"] for one in client.get(URL).json()["data"]] == ["law/1"] == [info.id for info in rag.documents()]
    assert described["metadata"] == {"by": "Ada"}
    replaced = client.put(f"{URL}/law/1", json={"text": "another text"}).json()
    assert (replaced["pinned"], replaced["metadata"]) == (True, {"by": "Ada"})
    same = client.put(f"{URL}/law/1", json={"text": "another text", "metadata": {"by": "Bob", "n": [1]}}).json()
    assert same["metadata"] == client.get(f"{URL}/law/1").json()["metadata"] == {"by": "Bob", "n": [1]}
    assert client.delete(f"{URL}/law/1").json() == {"id": "law/1", "object": "document", "deleted": True}
    for reply in (client.get(f"{URL}/law/1"), client.delete(f"{URL}/law/1")):
        assert (reply.status_code, reply.json()["error"]["code"]) == (404, "not_found")


def test_what_is_no_document_is_refused(client):
    for wrong in ({}, {"text": ""}, {"text": "a", "ttl": 0}, {"text": "a", "ttl": "1"}, {"text": 1}, {"text": "a", "other": 1}):
        assert client.put(f"{URL}/a", json=wrong).status_code == 400
    assert client.get("/nowhere").json()["error"]["type"] == "invalid_request_error"
    assert client.post("/v1/models").status_code == 405
