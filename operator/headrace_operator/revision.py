"""A role's revision: the hash of what the user wrote for its pods, and the template kept under that hash.

Defaults and replicas do not enter the hash, and keys are sorted: scaling, a newer operator or a reordered file change
no revision and so restart no pod. The template is stored in a ControllerRevision; a group is always rebuilt from its
own revision's template, never from today's spec. Pure.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Self

from headrace_operator.api import Parallelism, Spec
from headrace_operator.api_engine import Engine, Model, Transfer
from headrace_operator.api_pods import PodTemplate, RoleResources
from headrace_operator.names import REVISION_LENGTH
from headrace_operator.rules import RuledModel


class RoleTemplate(RuledModel):
    """All that decides one role's pods, but for how many groups there are."""

    model: Model
    engine: Engine = Engine()
    transfer: Transfer = Transfer()
    drain_timeout_seconds: int = 120
    parallelism: Parallelism = Parallelism()
    resources: RoleResources = RoleResources()
    template: PodTemplate = PodTemplate()
    compute_domain: bool = False  # each group has one
    is_default_image: bool = False  # engine.image was filled in

    @classmethod
    def of(cls, spec: Spec, role_name: str) -> Self:
        """The template of a role that is in the spec."""
        role = spec.role(role_name)
        if role is None:
            raise KeyError(f"the spec has no role {role_name}")
        return cls(
            model=spec.model,
            engine=spec.engine,
            transfer=spec.transfer,
            drain_timeout_seconds=spec.drain_timeout_seconds,
            parallelism=role.parallelism,
            resources=role.resources,
            template=role.template,
            # A group of one pod has nothing to share across nodes, and a node can be in one ComputeDomain at a time.
            compute_domain=bool(spec.placement and spec.placement.compute_domain and role.parallelism.num_pods > 1),
        )

    def as_written(self) -> dict[str, Any]:
        """What differs from the defaults, as plain data."""
        return self.model_dump(mode="json", by_alias=True, exclude_defaults=True)

    @property
    def revision(self) -> str:
        written = self.as_written()
        if "template" in written:
            written["template"] = _in_any_order(written["template"])
        return content_hash(written)[:REVISION_LENGTH]

    def with_image(self, image: str) -> Self:
        """The template with the default image filled in, as it is stored: a revision keeps the image it began with."""
        if self.engine.image is not None:
            return self
        engine = self.engine.model_copy(update={"image": image})
        return self.model_copy(update={"engine": engine, "is_default_image": True})

    @property
    def kv_fingerprint(self) -> str:
        """Hash of all in the resource that decides the bytes of the KV cache: groups can pair iff theirs are equal.

        Known before any engine runs, and the same for both roles of one spec. Engines compare fingerprints of their
        own, which tell of the weights themselves; this one is for planning roll-outs. An image counts if the user
        chose it: another one may lay out its cache in another way.
        """
        engine = self.engine
        record = {
            "source": self.model.source.model_dump(mode="json", by_alias=True),
            "image": None if self.is_default_image else engine.image,
            "dtype": engine.dtype,
            "cacheDtype": engine.cache_dtype,
            "blockSize": engine.block_size,
        }
        if engine.fake_quantization != "none":  # left out otherwise, as fingerprints were before there was this field
            record["fakeQuantization"] = engine.fake_quantization
        return content_hash(record)[:REVISION_LENGTH]


def _in_any_order(template: dict[str, Any]) -> dict[str, Any]:
    """Lists whose items have an identity, sorted by it: appliers that share such a list may reorder it."""
    result = dict(template)
    for field, key in (("volumes", "name"), ("volumeMounts", "mountPath"), ("env", "name")):
        items = result.get(field, [])
        # A variable may refer to those before it.
        if items and not any("$(" in str(item.get("value", "")) for item in items):
            result[field] = sorted(items, key=lambda item: str(item[key]))
    return result


def content_hash(data: Any) -> str:
    """Hex SHA-256 of plain data, independent of the order of keys."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()
