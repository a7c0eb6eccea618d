"""A `longkv score` process: requests and replies as lines of JSON (docs/evaluation.md), for adapters of other harnesses."""
import json
import os
import subprocess

HERE = os.path.dirname(os.path.abspath(__file__))
PROGRAM = os.path.join(HERE, "..", "build", "release", "longkv")


class Score:
    def __init__(self, program, model, kv, context, threads, more):
        command = [program or PROGRAM, "score", "-q", "-m", model, "--kv", kv, *more]
        if context:
            command += ["-c", str(context)]
        if threads:
            command += ["-t", str(threads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        encoding="utf-8", bufsize=1)

    def ask(self, request):
        """One reply; RuntimeError with the program's reason where there is none."""
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise RuntimeError(f"longkv ended with exit code {self.process.wait()}; its message stands above")
        reply = json.loads(line)
        if "error" in reply:
            raise RuntimeError("longkv: " + reply["error"])
        return reply

    def close(self):
        """The exit code; a second call gives it again."""
        for pipe in (self.process.stdin, self.process.stdout):
            try:
                pipe.close()
            except BrokenPipeError:  # a request that nobody read
                pass
        return self.process.wait()
