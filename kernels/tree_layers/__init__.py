"""Model layers and their memory, shared by several services. Of this project, imports only the kernels."""
