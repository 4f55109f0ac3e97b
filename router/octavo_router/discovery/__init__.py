"""Where endpoints come from: lists, files, DNS, Kubernetes. Each source tells its whole set."""
