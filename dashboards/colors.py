"""Colors that are told apart without color vision too (Okabe and Ito), and what each stands for."""

from __future__ import annotations

from kvcache_exporter.engine_state import ASLEEP, FROZEN, IDLE, SERVING, STARTING
from kvcache_exporter.gpu_memory import FREE, KV_CACHE, OTHER_PROCESSES, OVERHEAD, RESERVED, UNKNOWN, WEIGHTS
from kvcache_exporter.limits import COMPUTE, DEFERRED, KV_BLOCKS, MAX_NUM_SEQS, STATE_SLOTS

BLUE = "#0072B2"
ORANGE = "#E69F00"
GREEN = "#009E73"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
SKY = "#56B4E9"
YELLOW = "#F0E442"
GRAY = "#999999"
WHITE = "#F0F0F0"

GOOD = GREEN
WATCH = ORANGE
BAD = VERMILLION
NEUTRAL = SKY

# As on the exporter's own page.
COMPONENTS = {
    WEIGHTS: BLUE,
    KV_CACHE: ORANGE,
    OVERHEAD: GREEN,
    OTHER_PROCESSES: VERMILLION,
    UNKNOWN: GRAY,
    RESERVED: SKY,
    FREE: WHITE,
}

# What stands on the board for each value of the labels `limit` and `state`.
LIMITS = {
    KV_BLOCKS: ("KV-cache blocks", ORANGE),
    MAX_NUM_SEQS: ("seats (max_num_seqs)", BLUE),
    STATE_SLOTS: ("state slots", PURPLE),
    DEFERRED: ("deferred requests", YELLOW),
    COMPUTE: ("compute", SKY),
}
STATES = {
    SERVING: ("serving", GREEN),
    IDLE: ("idle", SKY),
    STARTING: ("starting", YELLOW),
    ASLEEP: ("asleep", GRAY),
    FROZEN: ("frozen", VERMILLION),
}
# By how bad it is: a GPU can be held back for several reasons.
THROTTLE_REASONS = {
    "power_cap": ("power limit", SKY),
    "thermal": ("too hot", ORANGE),
    "hw_slowdown": ("slowed by the board", VERMILLION),
    "power_brake": ("power brake", PURPLE),
}
