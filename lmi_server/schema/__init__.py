"""JSON Schemas of the files that configure models and the server, made from the declarations of their keys."""
