"""pump: file -> pinned buffers -> GPU, piece by piece, without the interpreter:
what a thread of staging.py does for long.

In Python each piece takes the interpreter's lock five times, which twelve threads and the engine want too:
37.5 GB/s where this loop gives 46.7 (H100, the rest as in staging.py). It is in LLVM's language, for the LLVM
that Numba is built on: Numba itself takes 0.2 s and more to import. llvmlite takes 20 to 100 ms, 0.32 s the
first time on a fresh machine, and the compilation 10 to 20 ms; `prepare` has both done while the engine waits
for the driver.
"""

import ctypes
from functools import cache
from threading import Lock, Thread

CODE = 7  # where a state holds the code of the driver's last call
# state, i64 each: pread, cuEventSynchronize, cuMemcpyHtoDAsync, cuEventRecord (addresses); stream; bytes of a
# buffer; buffers; code; then address and event of each buffer.
_SOURCE = """
define i64 @pump(i32 %file, i64 %first, i64 %count, i64 %address, i64 %turn, ptr %state) {
entry:
  %pread = load ptr, ptr %state
  %s1 = getelementptr i64, ptr %state, i64 1
  %synchronize = load ptr, ptr %s1
  %s2 = getelementptr i64, ptr %state, i64 2
  %copy = load ptr, ptr %s2
  %s3 = getelementptr i64, ptr %state, i64 3
  %record = load ptr, ptr %s3
  %s4 = getelementptr i64, ptr %state, i64 4
  %stream = load ptr, ptr %s4
  %s5 = getelementptr i64, ptr %state, i64 5
  %piece = load i64, ptr %s5
  %s6 = getelementptr i64, ptr %state, i64 6
  %buffers = load i64, ptr %s6
  %code = getelementptr i64, ptr %state, i64 7
  %pairs = getelementptr i64, ptr %state, i64 8
  store i64 0, ptr %code
  br label %next
next:
  %done = phi i64 [0, %entry], [%more, %recorded]
  %i = phi i64 [%turn, %entry], [%i1, %recorded]
  %left = sub i64 %count, %done
  %is_over = icmp sle i64 %left, 0
  br i1 %is_over, label %end, label %wait
wait:
  %i1 = add i64 %i, 1
  %which = urem i64 %i, %buffers
  %at = mul i64 %which, 2
  %p0 = getelementptr i64, ptr %pairs, i64 %at
  %buffer = load ptr, ptr %p0
  %p1 = getelementptr i64, ptr %p0, i64 1
  %event = load ptr, ptr %p1
  %c1 = call i32 %synchronize(ptr %event)
  %ok1 = icmp eq i32 %c1, 0
  br i1 %ok1, label %read, label %failed
read:
  %is_last = icmp slt i64 %left, %piece
  %want = select i1 %is_last, i64 %left, i64 %piece
  %from = add i64 %first, %done
  %got = call i64 %pread(i32 %file, ptr %buffer, i64 %want, i64 %from)
  %is_whole = icmp eq i64 %got, %want
  br i1 %is_whole, label %send, label %end
send:
  %to = add i64 %address, %done
  %c2 = call i32 %copy(i64 %to, ptr %buffer, i64 %want, ptr %stream)
  %ok2 = icmp eq i32 %c2, 0
  br i1 %ok2, label %sent, label %failed
sent:
  %c3 = call i32 %record(ptr %event, ptr %stream)
  %ok3 = icmp eq i32 %c3, 0
  br i1 %ok3, label %recorded, label %failed
recorded:
  %more = add i64 %done, %want
  br label %next
failed:
  %c = phi i32 [%c1, %wait], [%c2, %send], [%c3, %sent]
  %wide = zext i32 %c to i64
  store i64 %wide, ptr %code
  br label %end
end:
  ret i64 %done
}
"""

_LOCK = Lock()


def prepare():
    """Begin to compile the loop in a thread: an engine has other things to wait for before its first load."""
    Thread(target=pump).start()  # not a daemon: LLVM would not survive the interpreter's end


def pump():
    """The loop, compiled once: pump(file, first, count, address, turn, state)
    -> bytes whose copies are in the stream.

    file: descriptor. first: byte of the file. count: bytes, any. address: of the first one on the device.
    turn: of which piece this thread is at, so that its buffers take turns. state: of `state_of`. Fewer bytes
    than count: state[CODE] says why, or it is 0 and a read fell short or failed. Needs the device's context.
    Errors: none.
    """
    with _LOCK:
        return _compiled()


@cache
def _compiled():
    from llvmlite import binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    machine = llvm.Target.from_default_triple().create_target_machine(opt=1)
    compiled = llvm.create_mcjit_compiler(llvm.parse_assembly(_SOURCE), machine)
    compiled.finalize_object()
    i64 = ctypes.c_int64
    kind = ctypes.CFUNCTYPE(i64, ctypes.c_int32, i64, i64, ctypes.c_uint64, i64, ctypes.c_void_p)
    function = kind(compiled.get_function_address("pump"))
    function.compiled = compiled  # kept, with the code
    return function


def state_of(device, stream, piece, buffers):
    """The state of a thread. buffers: (address, event) pairs of `piece` bytes each.
    Errors: RuntimeError of one line."""
    calls = [ctypes.cast(ctypes.CDLL(None).pread, ctypes.c_void_p).value]
    for name in ("cuEventSynchronize", "cuMemcpyHtoDAsync", "cuEventRecord"):
        address = device.do(device.driver.cuGetProcAddress(name.encode(), 12000, 0))
        if not address:
            raise RuntimeError(f"CUDA driver: it has no {name}")
        calls.append(int(address))
    values = [*calls, int(stream), piece, len(buffers), 0, *(int(x) for pair in buffers for x in pair)]
    return (ctypes.c_uint64 * len(values))(*values)
