/* The inner loop of copying.py: copies that threads share out among them, without the GIL.

   It is optional. Where there was no compiler at installation, copying.py does the same with memmove. */

#define Py_LIMITED_API 0x030B0000
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <emmintrin.h>

/* Past the caches: a plain store reads the line that it is about to overwrite, which for large copies is a third
   of all traffic to memory. */
static void stream(char *to, const char *from, size_t n)
{
    size_t head = -(uintptr_t)to & 63;
    if (n < 256 + head) {
        memcpy(to, from, n);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, n -= head;
    for (; n >= 64; n -= 64, to += 64, from += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)from);
        __m128i b = _mm_loadu_si128((const __m128i *)(from + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + 48));
        _mm_stream_si128((__m128i *)to, a);
        _mm_stream_si128((__m128i *)(to + 16), b);
        _mm_stream_si128((__m128i *)(to + 32), c);
        _mm_stream_si128((__m128i *)(to + 48), d);
    }
    memcpy(to, from, n);
}

/* Streamed stores are not ordered with others; whoever learns that the copy is done must see it. */
static void finish(void) { _mm_sfence(); }

#else

static void stream(char *to, const char *from, size_t n) { memcpy(to, from, n); }
static void finish(void) {}

#endif

/* A job is an array of 64-bit numbers: how many copies were begun, how many there are, whether to stream, and for
   each copy where to, where from, how many bytes. Every thread that works on it takes the next copy. */
enum { BEGUN, COUNT, STREAM, FIRST };

static PyObject *work(PyObject *module, PyObject *job)
{
    Py_buffer view;
    if (PyObject_GetBuffer(job, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    int64_t *numbers = view.buf;
    int64_t room = view.len / 8 - FIRST;
    if (room < 0 || numbers[COUNT] < 0 || numbers[COUNT] > room / 3) {
        PyBuffer_Release(&view);
        PyErr_SetString(PyExc_ValueError, "the job has not as many copies as it says");
        return NULL;
    }
    int64_t count = numbers[COUNT], place;
    int streaming = numbers[STREAM] != 0;
    Py_BEGIN_ALLOW_THREADS
    while ((place = __atomic_fetch_add(&numbers[BEGUN], 1, __ATOMIC_RELAXED)) < count) {
        const int64_t *copy = numbers + FIRST + 3 * place;
        if (streaming)
            stream((char *)copy[0], (const char *)copy[1], (size_t)copy[2]);
        else
            memcpy((char *)copy[0], (const char *)copy[1], (size_t)copy[2]);
    }
    if (streaming)
        finish();
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
    {"work", work, METH_O, "Make the copies of a job that nobody has begun."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "_copy", NULL, 0, methods, NULL, NULL, NULL, NULL};

PyMODINIT_FUNC PyInit__copy(void) { return PyModuleDef_Init(&module); }
