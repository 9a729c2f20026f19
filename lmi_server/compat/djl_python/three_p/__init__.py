"""The form of requests that Amazon Bedrock sends to models of third parties."""
