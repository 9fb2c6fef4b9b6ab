"""``rlplane dash``: the page. Needs the extra ``web``; loads no torch.

app.py         the routes, and the server around them
broadcast.py   one picture per tick, encoded once for all the browsers
guard.py       who may see it, what a browser may do with it, and how long it may take to ask
view.py        a snapshot as the page wants it
static/        the page itself: HTML, CSS, ES modules, and uPlot in vendor/
"""
