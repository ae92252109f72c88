"""The Quartet contract: stubs generated from protos/quartet by protos/generate.sh. Do not edit."""
