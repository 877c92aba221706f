from __future__ import annotations

import pytest

from k8s.manifest import check_image, check_pinned
from pipeline.spec.errors import ConfigError

DIGEST = f"@sha256:{'a' * 64}"


@pytest.mark.parametrize(
    "image", [f"a{DIGEST}", f"r.example:5000/team/a{DIGEST}", f"a:1{DIGEST}", "127.0.0.1:5000/a:0123456789ab"]
)
def test_what_is_named_by_its_content_may_go_to_a_cluster(image: str) -> None:
    check_image(image)
    check_pinned(image, "deploy.image")


@pytest.mark.parametrize("image", ["a:1", "r.example:5000/a:2026-01-01", "a:0123456789abc", "a:0123456789AB"])
def test_a_tag_that_somebody_may_move_is_refused_by_the_word_that_named_it(image: str) -> None:
    check_image(image)
    with pytest.raises(ConfigError, match=r"^deploy\.image: .*pipe package --push"):
        check_pinned(image, "deploy.image")


@pytest.mark.parametrize("image", ["a", "a:latest", "r.example:5000/a", "r.example/a:latest"])
def test_the_latest_of_anything_is_refused(image: str) -> None:
    for check in (check_image, lambda name: check_pinned(name, "deploy.image")):
        with pytest.raises(ConfigError, match="another image every day"):
            check(image)


@pytest.mark.parametrize("image", ["", "A:1", "a b:1", "a:1\n", "a@sha256:12", f"a{DIGEST}0"])
def test_what_is_no_name_of_an_image_is_refused(image: str) -> None:
    with pytest.raises(ConfigError, match="not a container image name"):
        check_image(image)
