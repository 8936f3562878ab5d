"""`dendro certify --openai`: answers of any server of OpenAI's HTTP API, checked against a reference model."""
