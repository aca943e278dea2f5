// Search in pages that were opened as files: browsers start no worker from file://, so its script runs in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class {
    onmessage = null;
    onerror = null;
    #frame = document.createElement("iframe");
    #waiting = [];
    #isReady = false;

    constructor(address) {
      this.#frame.hidden = true;
      this.#frame.onload = () => {
        this.#frame.onload = null;
        const inside = this.#frame.contentWindow;
        inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data: structuredClone(data) }));
        const script = inside.document.createElement("script");
        script.src = new URL(address, location.href);
        script.onerror = (event) => this.onerror?.(event);
        script.onload = () => {
          this.#isReady = true;
          this.#waiting.splice(0).forEach((data) => this.postMessage(data));
        };
        inside.document.body.append(script);
      };
      document.body.append(this.#frame);
    }

    postMessage(data) {
      if (this.#isReady) {
        const sent = structuredClone(data);
        setTimeout(() => this.#frame.contentWindow?.onmessage?.({ data: sent }));
      } else {
        this.#waiting.push(data);
      }
    }

    terminate() {
      this.#frame.remove();
    }
  };
}
