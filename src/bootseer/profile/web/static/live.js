// Replaces what the page says when the server has something newer; a page in which somebody works is left alone.
"use strict";
const { mark, keys } = document.currentScript.dataset;
const query = new URLSearchParams({ mark, keys: keys ?? "" });
const source = new EventSource(`/live?${query}`);
const news = document.getElementById("news");
const silent = "The server does not answer: this page may be old.";
source.onerror = () => { news.textContent = silent; };
source.onopen = () => { if (news.textContent === silent) news.textContent = ""; };
source.onmessage = async () => {
  const main = document.querySelector("main");
  if (main.contains(document.activeElement)) {
    news.textContent = "There is something newer: load the page again.";
    return;
  }
  try {
    const answer = await fetch(location.href);
    if (!answer.ok) return;
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    main.replaceWith(page.querySelector("main"));
    news.textContent = `Brought up to date at ${new Date().toLocaleTimeString()}.`;
  } catch {
    news.textContent = silent;
  }
};
