"""Azure OpenAI: OpenAI's API behind deployments. A model's name in the file is the name of a deployment.

Source: Microsoft Learn, "Azure OpenAI REST API reference", data plane inference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import quote

from backends.http.exchange import Exchange, decoded
from backends.openai.backend import OpenAI, OpenAIAPIOptions
from policies.nouns import Prompt, Request


@dataclass(frozen=True, slots=True)
class AzureOptions(OpenAIAPIOptions):
    """How to talk to Azure. `api_version` is the suffix of its paths; usage in streams needs 2024-09-01-preview."""

    api_version: str = "2024-10-21"


class Azure(OpenAI):
    """A resource at `url` (https://NAME.openai.azure.com)."""

    kind = "azure"
    options_type = AzureOptions
    _options: AzureOptions

    @staticmethod
    def _key_headers(key: str) -> Mapping[str, str]:
        return {"api-key": key}

    def exchange(self, request: Request, prompt: Prompt) -> Exchange:
        """As OpenAI's, to the path of the deployment."""
        exchange = super().exchange(request, prompt)
        deployment = quote(self._backends_name(request), safe="")
        path = f"/openai/deployments/{deployment}{exchange.post.path.removeprefix('/v1')}"
        return exchange._replace(post=exchange.post._replace(path=self._versioned(path)))

    async def _look(self) -> None:
        """Ask for the resource's base models. A key cannot list deployments: they are those that the file names."""
        decoded(await self.client.get(self._versioned("/openai/models")), self.name, "its models")

    def _versioned(self, path: str) -> str:
        return f"{path}?api-version={quote(self._options.api_version)}"
