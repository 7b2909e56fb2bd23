"""The local registry's HTTP interface: as much of the OCI distribution API as making an image needs."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from .addresses import REGISTRY_URL
from .console import ClusterError

MANIFEST_TYPE = "application/vnd.oci.image.manifest.v1+json"
CONFIG_TYPE = "application/vnd.oci.image.config.v1+json"
LAYER_TYPE = "application/vnd.oci.image.layer.v1.tar+zstd"
TIMEOUT_SECONDS = 300


class Registry:
    """A client of one registry that is reached by plain HTTP."""

    def __init__(self, url: str = REGISTRY_URL) -> None:
        self._api = f"{url}/v2"

    def answers(self) -> bool:
        try:
            self._request("GET", "/").close()
        except (ClusterError, OSError):
            return False
        return True

    def has_manifest(self, name: str, tag: str) -> bool:
        return self._exists(f"/{name}/manifests/{tag}", {"Accept": MANIFEST_TYPE})

    def manifest(self, name: str, tag: str) -> dict[str, Any]:
        return self._json(f"/{name}/manifests/{tag}", {"Accept": MANIFEST_TYPE})

    def config(self, name: str, manifest: dict[str, Any]) -> dict[str, Any]:
        """The image configuration that `manifest` points to."""
        return self._json(f"/{name}/blobs/{manifest['config']['digest']}", {})

    def mount_blob(self, name: str, digest: str, source: str) -> None:
        """Makes a blob of the image `source` a blob of the image `name` too, without a copy."""
        if not self._exists(f"/{name}/blobs/{digest}", {}):
            self._request("POST", f"/{name}/blobs/uploads/?mount={digest}&from={source}", b"").close()

    def put_file(self, name: str, path: Path, digest: str) -> None:
        """Uploads a file as the blob `digest`."""
        if self._exists(f"/{name}/blobs/{digest}", {}):
            return
        with path.open("rb") as content:
            self._put(self._upload_address(name, digest), content, path.stat().st_size)

    def put_json(self, name: str, content: dict[str, Any]) -> dict[str, Any]:
        """Uploads an image configuration; returns its descriptor."""
        raw = json.dumps(content).encode()
        digest = "sha256:" + hashlib.sha256(raw).hexdigest()
        self._put(self._upload_address(name, digest), raw, len(raw))
        return {"mediaType": CONFIG_TYPE, "digest": digest, "size": len(raw)}

    def put_manifest(self, name: str, tag: str, manifest: dict[str, Any]) -> None:
        raw = json.dumps(manifest).encode()
        self._request("PUT", f"/{name}/manifests/{tag}", raw, {"Content-Type": MANIFEST_TYPE}).close()

    def _upload_address(self, name: str, digest: str) -> str:
        with self._request("POST", f"/{name}/blobs/uploads/", b"") as answer:
            location = answer.headers["Location"]
        return f"{location}{'&' if '?' in location else '?'}digest={digest}"

    def _put(self, url: str, content: Any, size_bytes: int) -> None:
        headers = {"Content-Type": "application/octet-stream", "Content-Length": str(size_bytes)}
        self._request("PUT", url, content, headers).close()

    def _json(self, path: str, headers: dict[str, str]) -> dict[str, Any]:
        with self._request("GET", path, headers=headers) as answer:
            content = json.load(answer)
        if not isinstance(content, dict):
            raise ClusterError(f"registry: {path} is not a JSON object")
        return content

    def _exists(self, path: str, headers: dict[str, str]) -> bool:
        try:
            self._request("HEAD", path, headers=headers).close()
        except _NotFound:
            return False
        return True

    def _request(
        self, method: str, path: str, data: Any = None, headers: dict[str, str] | None = None
    ) -> http.client.HTTPResponse:
        url = path if path.startswith("http") else self._api + path
        request = urllib.request.Request(url, data=data, method=method, headers=headers or {})
        try:
            answer: http.client.HTTPResponse = urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS)
        except urllib.error.HTTPError as error:
            kind = _NotFound if error.code == 404 else ClusterError
            raise kind(
                f"registry: {method} {path}: status {error.code}: {error.read(300).decode(errors='replace')}"
            ) from None
        except urllib.error.URLError as error:
            raise ClusterError(f"registry: {method} {url}: {error.reason}") from None
        return answer


class _NotFound(ClusterError):
    """The registry does not have it."""
