"""The endpoints, by what they are about; `table` lists them once for the app and for the OpenAPI document."""
