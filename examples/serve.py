"""A language model behind HTTP: requests of unequal lengths are answered in batches, token by token.

    partway run --workers 4 examples/serve.py         # 4 processes, a part of the model in each
    partway run --simulate 4 examples/serve.py        # 4 virtual devices in one process
    python examples/serve.py --plain                  # one process, without Partway

    curl -N localhost:8000/generate -H 'content-type: application/json' \\
         -d '{"tokens": [5, 3, 8], "max_new_tokens": 8}'

Rank 0 listens. It takes up to `--batch` requests that wait, pads their prompts on the left to one of a few lengths, and
tells the other ranks; every rank then runs the same calls, and rank 0 chooses the tokens. Keys and values stay on the
ranks that made them. A request that comes meanwhile waits for the next batch; where `--waiting` of them wait, another
is told to come back later. Needs `pip install partway[serve]`.
"""

from __future__ import annotations

import asyncio
import json
import queue
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
import uvicorn
from fastapi import FastAPI, HTTPException, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, Field
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, StaticCache

import partway as pw

STEP = 16  # prompts are padded to a multiple of it
IDLE = 0.5  # seconds after which rank 0 tells the others that there is nothing to do
NOTHING, BATCH, END = range(3)  # what rank 0 tells them


class Asked(BaseModel):
    """What a client asks for. `temperature` 0 takes the most likely token."""

    tokens: list[int] = Field(min_length=1)
    max_new_tokens: int = Field(16, ge=1)
    temperature: float = Field(0.0, ge=0.0)
    seed: int = 0
    stream: bool = True


@dataclass(eq=False)
class Job:
    """A request under way: `tokens` hands its tokens to the client, then why there are no more."""

    asked: Asked
    loop: asyncio.AbstractEventLoop
    tokens: asyncio.Queue[int | str] = field(default_factory=asyncio.Queue)
    given: int = 0
    over: bool = False

    def __post_init__(self) -> None:
        self.numbers = torch.Generator().manual_seed(self.asked.seed)

    def give(self, token: int) -> None:
        """Hand over a token."""
        self.given += 1
        self._put(token)
        if self.given == self.asked.max_new_tokens:
            self.end("length")

    def end(self, why: str) -> None:
        """There are no more tokens."""
        self.over = True
        self._put(why)

    def _put(self, item: int | str) -> None:
        with suppress(RuntimeError):  # the loop is closed: nobody listens
            self.loop.call_soon_threadsafe(self.tokens.put_nowait, item)

    def choose(self, scores: Tensor) -> int:
        """The next token."""
        if not self.asked.temperature:
            return int(scores.argmax())
        likely = torch.softmax(scores.float().cpu() / self.asked.temperature, -1)
        return int(torch.multinomial(likely, 1, generator=self.numbers))


class Decoder:
    """A model with a cache of keys and values for `rows` texts of at most `room` tokens. Every rank has one.

    lengths   those that prompts are padded to
    slots     tokens that a row of the cache has room for, padding included
    """

    def __init__(self, model: Any, rows: int, room: int) -> None:
        self.model, self.rows, self.room = model, rows, room
        self.lengths = range(STEP, room + STEP, STEP)
        self.slots = room + STEP

    def length_of(self, asked: Sequence[Asked]) -> int | None:
        """The length to which prompts that are answered together are padded; None where there is no room for all."""
        longest, most = max(len(one.tokens) for one in asked), max(one.max_new_tokens for one in asked)
        length = -(-longest // STEP) * STEP
        return length if length + most <= self.slots else None

    @torch.inference_mode()
    def start(self, ids: Tensor, counts: Tensor) -> Tensor:
        """The scores of the first new tokens. `ids`: prompts [rows, length], padded on the left; `counts`: how many
        tokens each has."""
        ids, length = ids.contiguous(), ids.shape[1]
        slots = torch.arange(self.slots)
        self._first = length - counts  # the slot of each text's first token
        self._seen = slots >= self._first[:, None]
        self._next = length
        places = (torch.arange(length) - self._first[:, None]).clamp(min=0)
        mask = self._seen[:, None] & (slots <= torch.arange(length)[:, None])
        return self._scores(ids, places, mask, StaticCache(self.model.config, max_cache_len=self.slots))

    @torch.inference_mode()
    def step(self, ids: Tensor) -> Tensor:
        """The scores of the next tokens, after `ids` [rows]."""
        mask = self._seen & (torch.arange(self.slots) <= self._next)
        places = (self._next - self._first)[:, None]
        self._next += 1
        return self._scores(ids[:, None], places, mask[:, None], self._cache)

    def _scores(self, ids: Tensor, places: Tensor, mask: Tensor, cache: Any) -> Tensor:
        result = self.model(
            input_ids=ids, position_ids=places, attention_mask=mask[:, None], past_key_values=cache, logits_to_keep=1
        )
        self._cache = result.past_key_values
        scores: Tensor = result.logits[:, -1]
        return scores

    def prepare(self) -> None:
        """Plan all calls, and make their programs, before the first request."""
        for length in self.lengths:
            self.start(torch.zeros(self.rows, length, dtype=torch.long), torch.full((self.rows,), length))
        self.step(torch.zeros(self.rows, dtype=torch.long))


# -- The ranks ---------------------------------------------------------------------------------------------------------


def told(message: Sequence[int] | Tensor, count: int) -> Tensor:
    """`message`, `count` integers, as rank 0 has it."""
    tensor = torch.as_tensor(message, dtype=torch.long) if len(message) else torch.zeros(count, dtype=torch.long)
    if dist.is_initialized():
        dist.broadcast(tensor, 0)
    return tensor


def follow(decoder: Decoder) -> None:
    """Do what rank 0 does, until it ends. A launcher that ends sends its signal to every rank: rank 0 says when."""
    for each in (signal.SIGINT, signal.SIGTERM):
        signal.signal(each, signal.SIG_IGN)
    while True:
        kind, length = told([], 2).tolist()
        if kind == END:
            return
        if kind == BATCH:
            prompts = told([], decoder.rows * (length + 1)).view(decoder.rows, length + 1)
            decoder.start(prompts[:, 1:], prompts[:, 0])
            while (tokens := told([], decoder.rows + 1))[0]:
                decoder.step(tokens[1:])


class Leader:
    """Rank 0: the requests that wait, and a thread that answers them.

    failed   why there are no more answers; "" while there are
    """

    def __init__(self, decoder: Decoder, waiting: int) -> None:
        self.decoder, self.failed = decoder, ""
        self.waiting: queue.Queue[Job] = queue.Queue(waiting)
        self._left: Job | None = None  # of the last batch, which had no room for it
        self.ending = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        jobs: list[Job] = []
        try:
            while not (self.ending.is_set() and self.waiting.empty() and self._left is None):
                if jobs := self._next_jobs():
                    self._answer(jobs)
                else:
                    told([NOTHING, 0], 2)
            told([END, 0], 2)
        except Exception as error:  # a rank has gone: nobody can be answered
            self.failed = f"the model has stopped: {type(error).__name__}: {str(error).splitlines()[0]}"
            with suppress(queue.Empty):
                while True:
                    jobs.append(self.waiting.get_nowait())
            for job in (*jobs, *filter(None, [self._left])):
                if not job.over:
                    job.end(self.failed)

    def _next_jobs(self) -> list[Job]:
        """Requests that wait: as many as a batch takes."""
        jobs = [self._left] if self._left else []
        self._left = None
        with suppress(queue.Empty):
            while len(jobs) < self.decoder.rows:
                job = self.waiting.get(timeout=None if jobs else IDLE, block=not jobs)
                if job.over:
                    continue
                if jobs and self.decoder.length_of([each.asked for each in (*jobs, job)]) is None:
                    self._left = job
                    break
                jobs.append(job)
        return jobs

    def _answer(self, jobs: Sequence[Job]) -> None:
        rows, length = self.decoder.rows, self.decoder.length_of([job.asked for job in jobs])
        assert length is not None
        prompts = torch.zeros(rows, length + 1, dtype=torch.long)
        prompts[:, 0] = 1  # a row without a request has one token, so that its attention has something to see
        for row, job in zip(prompts, jobs, strict=False):
            row[0] = len(job.asked.tokens)
            row[-len(job.asked.tokens) :] = torch.tensor(job.asked.tokens)
        told([BATCH, length], 2)
        told(prompts.flatten(), prompts.numel())
        scores = self.decoder.start(prompts[:, 1:], prompts[:, 0])
        while True:
            tokens = [0] * rows
            for i, job in enumerate(jobs):
                if not job.over:
                    tokens[i] = job.choose(scores[i])
                    job.give(tokens[i])
            goes_on = not all(job.over for job in jobs)
            told([int(goes_on), *tokens], rows + 1)
            if not goes_on:
                return
            scores = self.decoder.step(torch.tensor(tokens))


# -- HTTP --------------------------------------------------------------------------------------------------------------


class Desk:
    """Takes requests, and hands on what is answered. Tokens are numbers below `vocabulary`."""

    def __init__(self, leader: Leader, vocabulary: int) -> None:
        self.leader, self.vocabulary = leader, vocabulary

    def take(self, asked: Asked, loop: asyncio.AbstractEventLoop) -> Job:
        """A job for what is asked, among those that wait. Raises HTTPException where there can be none."""
        leader, room, needed = self.leader, self.leader.decoder.room, len(asked.tokens) + asked.max_new_tokens
        if needed > room:
            counts = f"{len(asked.tokens)} tokens and {asked.max_new_tokens} new ones are {needed}"
            raise HTTPException(422, f"{counts}; this server has room for {room}")
        if wrong := [token for token in asked.tokens if not 0 <= token < self.vocabulary]:
            raise HTTPException(422, f"there is no token {wrong[0]}; tokens are numbers below {self.vocabulary}")
        if leader.failed or leader.ending.is_set():
            raise HTTPException(503, leader.failed or "this server is ending")
        job = Job(asked, loop)
        try:
            leader.waiting.put_nowait(job)
        except queue.Full:
            many = f"{leader.waiting.maxsize} requests wait already"
            raise HTTPException(503, f"{many}; come back later", {"Retry-After": "1"}) from None
        return job

    async def events(self, job: Job) -> AsyncIterator[str]:
        """The tokens of a job as they come."""
        try:
            while isinstance(item := await job.tokens.get(), int):
                yield f"data: {json.dumps({'token': item})}\n\n"
            yield f"data: {json.dumps({'end': item})}\n\n"
        finally:
            job.over = True  # a client that has gone needs no more tokens

    async def all_of(self, job: Job, request: Request) -> JSONResponse:
        """The tokens of a job when it has ended."""
        tokens: list[int] = []
        while True:
            try:
                item = await asyncio.wait_for(job.tokens.get(), IDLE)
            except TimeoutError:
                if await request.is_disconnected():
                    job.over = True
                    return JSONResponse({"end": "gone"})
                continue
            if isinstance(item, str):
                return JSONResponse({"tokens": tokens, "end": item}, 200 if item == "length" else 503)
            tokens.append(item)

    def health(self) -> JSONResponse:
        """How the server is."""
        leader = self.leader
        state = {
            "room": leader.decoder.room, "batch": leader.decoder.rows, "waiting": leader.waiting.qsize(),
            "failed": leader.failed,
        }  # fmt: skip
        return JSONResponse(state, 503 if leader.failed else 200)


def app_of(desk: Desk) -> FastAPI:
    """The routes."""
    app = FastAPI(title="Partway serves")

    @app.post("/generate")
    async def generate(asked: Asked, request: Request) -> Any:
        job = desk.take(asked, asyncio.get_running_loop())
        if asked.stream:
            return StreamingResponse(desk.events(job), media_type="text/event-stream")
        return await desk.all_of(job, request)

    @app.get("/health")
    def health() -> JSONResponse:
        return desk.health()

    return app


class Server(uvicorn.Server):
    """Ends when nobody can be answered any more, and at a signal, after which the ranks end."""

    def __init__(self, config: uvicorn.Config, leader: Leader) -> None:
        super().__init__(config)
        self.leader = leader

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals end the server; uvicorn's own raises them again, which would end the process at once."""
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, self.handle_exit)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and say so."""
        await super().startup(sockets)
        print(f"listening on http://{self.config.host}:{self.config.port}", flush=True)

    async def on_tick(self, counter: int) -> bool:
        """Whether the server ends now."""
        return await super().on_tick(counter) or bool(self.leader.failed)


def listen(leader: Leader, vocabulary: int, host: str, port: int) -> None:
    """Answer requests until a signal or a failure ends it. Raises RuntimeError for the latter."""
    leader.thread.start()
    config = uvicorn.Config(
        app_of(Desk(leader, vocabulary)), host, port, log_level="warning", timeout_graceful_shutdown=30
    )
    try:
        Server(config, leader).run()
    finally:
        leader.ending.set()  # what waits is answered first
        leader.thread.join()
    if leader.failed:
        raise RuntimeError(leader.failed)
    print("ended", flush=True)


def model_of(folder: Path | None, hidden: int, layers: int) -> Any:
    """The model in a folder of transformers, or a Llama that has learned nothing."""
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder).eval()
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=1024, max_position_embeddings=4096,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def main(
    folder: Annotated[
        Path | None, typer.Option("--model", help="a folder of transformers; none: a small Llama")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="without Partway")] = False,
    devices: Annotated[int, typer.Option(min=1, help="virtual devices, where no launcher started this")] = 4,
    batch: Annotated[int, typer.Option(min=1, help="requests that are answered together")] = 4,
    room: Annotated[int, typer.Option(min=16, help="tokens of a request, with those that it asks for")] = 128,
    waiting: Annotated[int, typer.Option(min=1, help="requests that may wait")] = 16,
    hidden: Annotated[int, typer.Option(min=64, help="the small Llama's width")] = 256,
    layers: Annotated[int, typer.Option(min=1, help="the small Llama's layers")] = 4,
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port to listen on")] = 8000,
) -> None:
    """Answer requests until it is interrupted."""
    torch.set_num_threads(1)
    model = model_of(folder, hidden, layers)
    if not plain:
        lengths = {"input_ids": (1,), "position_ids": (1,), "attention_mask": (2,)}  # one plan for all prompts
        model = pw.shard(model, mesh={"tp": pw.init(simulate=devices)}, inference=True, dynamic=lengths)
    decoder = Decoder(model, batch, room)
    start = time.perf_counter()
    decoder.prepare()
    if dist.is_initialized() and dist.get_rank():
        follow(decoder)
        return
    print(f"prepared in {time.perf_counter() - start:.1f} s", flush=True)
    listen(Leader(decoder, waiting), model.config.vocab_size, host, port)


if __name__ == "__main__":
    typer.run(main)
