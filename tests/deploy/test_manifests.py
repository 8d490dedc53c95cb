"""The Kubernetes manifests against the API's own schemas; `make deploy-test` installs them (kubernetes-validate)."""

from pathlib import Path

import pytest
import yaml

api = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed; make deploy-test")
MANIFESTS = list(yaml.safe_load_all((Path(__file__).parents[2] / "deploy" / "kubernetes" / "kvdb.yaml").read_text()))


@pytest.mark.parametrize("manifest", MANIFESTS, ids=lambda one: one["kind"])
def test_every_release_knows_every_field(manifest):
    releases = api.utils.all_versions()
    assert len(releases) > 5
    for release in releases:
        api.validate(manifest, release, strict=True)


def test_a_field_that_does_not_exist_is_found():
    wrong = next(one for one in MANIFESTS if one["kind"] == "PodDisruptionBudget") | {"spec": {"maxUnavailabel": 0}}
    with pytest.raises(api.ValidationError, match="maxUnavailabel"):
        api.validate(wrong, api.latest_version(), strict=True)
