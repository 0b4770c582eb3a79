"""Evenhand beside PECOS XR-Linear and napkinXC, on the same files and features."""
