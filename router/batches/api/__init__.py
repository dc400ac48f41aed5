"""Files and batches over HTTP, in the formats of OpenAI and Anthropic."""
