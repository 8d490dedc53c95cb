"""The SDK: what a user holds, over one transport protocol."""
