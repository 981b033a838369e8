"""Makes calls by the `openai` client: reads one JSON object, prints the answers as a JSON list.

The object has ``base_url``, ``calls``, and the number ``threads`` of calls that are made at once. A
call has a ``path`` such as chat.completions, and the arguments ``args`` of its `create`. The answer
is what the client returned: an object, a list of objects for a stream, and for a failure an object
with ``status`` (None if the connection broke), ``message``, and the ``parts`` that came before.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from operator import attrgetter

import openai


def answer_of(client, call):
    parts = []
    try:
        answer = attrgetter(call["path"])(client).create(**call["args"])
        if not call["args"].get("stream"):
            return answer.model_dump()
        parts.extend(part.model_dump() for part in answer)
    except (openai.APIError, OSError) as error:
        status = getattr(error, "status_code", None)
        return {"status": status, "message": str(error), "parts": parts}
    return parts


def main():
    asked = json.load(sys.stdin)
    client = openai.OpenAI(base_url=asked["base_url"], api_key="none", max_retries=0, timeout=120)
    with ThreadPoolExecutor(asked.get("threads", 1)) as pool:
        answers = list(pool.map(lambda call: answer_of(client, call), asked["calls"]))
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
