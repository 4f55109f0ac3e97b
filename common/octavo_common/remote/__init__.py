"""Files in stores over HTTP: a client, AWS' signatures and keys, and buckets of S3's protocol."""
