"""SageMaker's runtime API, and jobs that run without their client."""
