"""Rewards over HTTP: `flowrl serve`. The messages are those of `core/wire.py`; the client is the reward `remote`.

messages.py   limits, and requests read strictly
app.py        endpoints: token, body, repeated requests
batching.py   requests of many clients joined into batches for one reward
process.py    a worker process as the server sees it: started, given a deadline, killed
worker.py     what runs in it: decodes images and scores them
counters.py   numbers for Prometheus
listener.py   sockets, deadlines of connections, signals
"""
