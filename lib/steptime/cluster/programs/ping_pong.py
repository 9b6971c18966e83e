"""Messages there and back between two ranks over one TCP connection: what one costs.

stdin: JSON with rank, address and port of rank 0, handle (rank 0's listening socket), bytes (sizes), repeats (of each
size), warmups, budget_s (of each size; at least one repeat is made). Rank 1 writes JSON: for each size a list of
seconds of one way, half of there and back. Standard library only.
"""

import json
import socket
import sys
import time


def receive(connection, view):
    while len(view):
        count = connection.recv_into(view)
        if not count:
            sys.exit("the peer closed the connection")
        view = view[count:]


def main():
    job = json.load(sys.stdin)
    if job["rank"] == 0:
        with socket.socket(fileno=job["handle"]) as server:
            connection, _ = server.accept()
    else:
        connection = socket.create_connection((job["address"], job["port"]), timeout=30)
        connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    one_way_s = []
    for size in job["bytes"]:
        message, again = bytearray(size), bytearray(b"y")
        times, begun = [], time.perf_counter()
        while again == b"y":
            start = time.perf_counter()
            if job["rank"] == 1:
                connection.sendall(message)
                receive(connection, memoryview(message))
                times.append((time.perf_counter() - start) / 2)
                enough = len(times) >= job["warmups"] + job["repeats"]
                again = b"n" if enough or time.perf_counter() - begun > job["budget_s"] else b"y"
                connection.sendall(again)
            else:
                receive(connection, memoryview(message))
                connection.sendall(message)
                receive(connection, memoryview(again))
        one_way_s.append(times[job["warmups"] :] or times[-1:])
    if job["rank"] == 1:
        json.dump(one_way_s, sys.stdout)


if __name__ == "__main__":
    main()
