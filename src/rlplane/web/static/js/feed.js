// The stream of pictures from the server, through lost connections and restarts.

const SILENT_AFTER_MS = 6000; // The server speaks at least once a second.
const RETRY_MS = 1500;

export class Feed {
  constructor({ onView, onStatus, onLink }) {
    this.handlers = { onView, onStatus, onLink };
    this.heardAt = 0;
    this.lost = false;
    this.open();
    setInterval(() => this.check(), 1000);
  }

  open() {
    this.source?.close();
    this.heardAt = performance.now();
    this.source = new EventSource("/events");
    this.source.addEventListener("view", (event) => {
      this.heard();
      this.handlers.onView(JSON.parse(event.data));
    });
    this.source.addEventListener("status", (event) => {
      this.heard();
      this.handlers.onStatus(JSON.parse(event.data));
    });
    this.source.addEventListener("error", () => {
      this.setLost(true);
      // The browser tries again by itself, except after an answer that it takes for final.
      if (this.source.readyState === EventSource.CLOSED) setTimeout(() => this.open(), RETRY_MS);
    });
  }

  heard() {
    this.heardAt = performance.now();
    this.setLost(false);
  }

  setLost(lost) {
    if (lost === this.lost) return;
    this.lost = lost;
    this.handlers.onLink(!lost);
  }

  check() {
    if (performance.now() - this.heardAt > SILENT_AFTER_MS) {
      this.setLost(true);
      this.open();
    }
  }
}
