"""Requests that two parsers could read differently, as bytes."""

from __future__ import annotations

POST = b"POST /v1/chat/completions HTTP/1.1\r\n"
HOST = b"Host: x\r\n"
JSON = b"Content-Type: application/json\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
CHUNKED = POST + HOST + JSON + b"Transfer-Encoding: chunked\r\n\r\n"

BAD_REQUESTS = {
    # two ways to find the end of the body
    "length and chunks": POST
    + HOST
    + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": POST
    + HOST
    + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n",
    "two lengths": POST + HOST + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}x",
    "two equal lengths": POST + HOST + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "a list of lengths": POST + HOST + b"Content-Length: 2, 2\r\n\r\n{}",
    "a signed length": POST + HOST + b"Content-Length: +2\r\n\r\n{}",
    "a negative length": POST + HOST + b"Content-Length: -2\r\n\r\n{}",
    "a length with an underscore": POST + HOST + b"Content-Length: 1_0\r\n\r\n{}",
    "a hexadecimal length": POST + HOST + b"Content-Length: 0x2\r\n\r\n{}",
    "an empty length": POST + HOST + b"Content-Length:\r\n\r\n{}",
    "a huge length": POST + HOST + b"Content-Length: " + b"9" * 30 + b"\r\n\r\n{}",
    # codings that are almost chunked
    "chunked, identity": POST + HOST + b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "identity, chunked": POST + HOST + b"Transfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
    "two spaces": POST + HOST + b"Transfer-Encoding:  chunked\r\n\r\n0\r\n\r\n",
    "a tab": POST + HOST + b"Transfer-Encoding:\tchunked\r\n\r\n0\r\n\r\n",
    "a trailing space": POST + HOST + b"Transfer-Encoding: chunked \r\n\r\n0\r\n\r\n",
    "upper case": POST + HOST + b"Transfer-Encoding: Chunked\r\n\r\n0\r\n\r\n",
    "a vertical tab": POST + HOST + b"Transfer-Encoding: \x0bchunked\r\n\r\n0\r\n\r\n",
    "a quoted one": POST + HOST + b'Transfer-Encoding: "chunked"\r\n\r\n0\r\n\r\n',
    "xchunked": POST + HOST + b"Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
    "an empty coding": POST + HOST + b"Transfer-Encoding:\r\n\r\n0\r\n\r\n",
    "two codings": POST + HOST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": POST.replace(b"1.1", b"1.0")
    + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    # lines that end otherwise
    "bare line feeds": b"GET /health HTTP/1.1\nHost: x\n\n",
    "one bare line feed": GET + b"A: b\nC: d\r\n\r\n",
    "a bare carriage return": GET + b"A: b\rC: d\r\n\r\n",
    "a folded line": GET + b"A: b\r\n c\r\n\r\n",
    "a first line that is folded": b"GET /health HTTP/1.1\r\n A: b\r\n" + HOST + b"\r\n",
    "an empty line first, twice": b"\r\n\r\n" + GET + b"\r\n",
    # names
    "a space before the colon": GET + b"A : b\r\n\r\n",
    "a space before content-length's colon": POST + HOST + b"Content-Length : 2\r\n\r\n{}",
    "no colon": GET + b"nonsense\r\n\r\n",
    "no name": GET + b": b\r\n\r\n",
    "a NUL in a name": GET + b"A\x00: b\r\n\r\n",
    "a NUL in a value": GET + b"A: b\x00c\r\n\r\n",
    "a control in a value": GET + b"A: b\x01c\r\n\r\n",
    "a DEL in a value": GET + b"A: b\x7fc\r\n\r\n",
    "a hard space in a name": GET + b"A\xa0: b\r\n\r\n",
    "a hard space around a name": GET + b"\xa0Content-Length: 5\r\n\r\n",
    "brackets in a name": GET + b"A[]: b\r\n\r\n",
    # whom it is for
    "no host": b"GET /health HTTP/1.1\r\n\r\n",
    "two hosts": GET + HOST + b"\r\n",
    "a host with a path": b"GET /health HTTP/1.1\r\nHost: x/y\r\n\r\n",
    "a host with a user": b"GET /health HTTP/1.1\r\nHost: a@x\r\n\r\n",
    "a host with a space": b"GET /health HTTP/1.1\r\nHost: x y\r\n\r\n",
    "an absolute target with a user": b"GET http://a@x/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "an absolute target without a host": b"GET http:///health HTTP/1.1\r\n" + HOST + b"\r\n",
    "an absolute target of another kind": b"GET ftp://x/health HTTP/1.1\r\n" + HOST + b"\r\n",
    "an absolute target and no host": b"GET http://x/health HTTP/1.1\r\n\r\n",
    "a star": b"GET * HTTP/1.1\r\n" + HOST + b"\r\n",
    "an authority as target": b"GET x:80 HTTP/1.1\r\n" + HOST + b"\r\n",
    "no target": b"GET HTTP/1.1\r\n" + HOST + b"\r\n",
    "a space in the target": b"GET /hea lth HTTP/1.1\r\n" + HOST + b"\r\n",
    "a tab in the request line": b"GET\t/health\tHTTP/1.1\r\n" + HOST + b"\r\n",
    "bytes above ASCII in the target": b"GET /h\xe9 HTTP/1.1\r\n" + HOST + b"\r\n",
    "a fragment": b"GET /health#x HTTP/1.1\r\n" + HOST + b"\r\n",
    # other protocols on this one
    "connection names the length": POST + HOST + b"Connection: content-length\r\n\r\n",
    "connection names the host": GET + b"Connection: host\r\n\r\n",
    "not HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    "HTTP/0.9": b"GET /health\r\n\r\n",
    "lower case http": b"GET /health http/1.1\r\n" + HOST + b"\r\n",
    "a method that is none": b"G(T /health HTTP/1.1\r\n" + HOST + b"\r\n",
}

# Unusual, and clear: what HTTP asks servers to take.
GOOD_CHUNKS = {
    "an extension": b"2;x=y\r\n{}\r\n0;last\r\n\r\n",
    "a quoted extension": b'2 ; x="a;b"\r\n{}\r\n0\r\n\r\n',
    "a trailer": b"2\r\n{}\r\n0\r\nX-Trailer: 1\r\n\r\n",
    "a trailer that looks like framing": b"2\r\n{}\r\n0\r\ncontent-length: 5\r\n\r\n",
}
UPGRADES = {
    "websocket": b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    "h2c": b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n",
    "without connection": b"Upgrade: h2c\r\n",
}

BAD_CHUNKS = {
    "an extension with a line in it": b"2;x=\ny\r\n{}\r\n0\r\n\r\n",
    "an extension with a carriage return": b"2;x=\ry\r\n{}\r\n0\r\n\r\n",
    "an extension with a NUL": b"2;x=\0\r\n{}\r\n0\r\n\r\n",
    "an extension without end": b"2;" + b"x" * 300 + b"\r\n{}\r\n0\r\n\r\n",
    "an extension to no size": b";x=y\r\n{}\r\n0\r\n\r\n",
    "0x": b"0x2\r\n{}\r\n0\r\n\r\n",
    "a sign": b"+2\r\n{}\r\n0\r\n\r\n",
    "a minus": b"-2\r\n{}\r\n0\r\n\r\n",
    "an underscore": b"0_2\r\n{}\r\n0\r\n\r\n",
    "a space before": b" 2\r\n{}\r\n0\r\n\r\n",
    "a space behind": b"2 \r\n{}\r\n0\r\n\r\n",
    "no digits": b"\r\n{}\r\n0\r\n\r\n",
    "no digits but a letter": b"g\r\n{}\r\n0\r\n\r\n",
    "a huge size": b"f" * 16 + b"\r\n{}\r\n0\r\n\r\n",
    "a size without end": b"0" * 300,
    "a size with a bare line feed": b"2\n{}\r\n0\r\n\r\n",
    "data longer than its size": b"1\r\n{}\r\n0\r\n\r\n",
    "data without its line end": b"2\r\n{}0\r\n\r\n",
    "a bare line feed behind data": b"2\r\n{}\n0\r\n\r\n",
    "a trailer with a bare line feed": b"2\r\n{}\r\n0\r\nx-trailer: 1\n\r\n",
    "a trailer without a colon": b"2\r\n{}\r\n0\r\nGET / HTTP/1.1\r\n\r\n",
    "a trailer with a blank name": b"2\r\n{}\r\n0\r\nx : 1\r\n\r\n",
    "a trailer with a carriage return": b"2\r\n{}\r\n0\r\nx: 1\r2\r\n\r\n",
    "a trailer with a NUL": b"2\r\n{}\r\n0\r\nx: \0\r\n\r\n",
    "trailers without end": b"2\r\n{}\r\n0\r\n" + b"x: y\r\n" * 4000,
}
